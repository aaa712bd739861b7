"""Trajectories of the real peers, and the settings of this library that mean the same.

Each peer has a `.npz` with arrays and a `.json` that says what ran. Everything here was recorded
by running the public release of the peer on fixed gradients; `about` in the `.json` names it.
"""

import functools
import json
import pathlib
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax

import optax_largebatch as lb
from optax_largebatch.transforms.learned_matrices import scale_by_learned_matrices
from tests.golden import muon_peers, vision_peers

HERE = pathlib.Path(__file__).parent
PEERS = (
    "mxnet_2_0_0b1",
    "mxnet_1_9_1",
    "torch_peers",
    "tensorflow_peers",
    "keras",
    "icefall",
    "vision_peers",
    "muon_peers",
)


class Case(NamedTuple):
    """One recorded run."""

    peer: str
    name: str
    dtype: str
    params: dict[str, Any]
    """A tree of start values."""
    grads: dict[str, Any]
    """The same tree with one gradient for each step on the first axis."""
    trajectory: dict[str, Any]
    """The same tree with the parameters after each step on the first axis."""
    optimizer: optax.GradientTransformation

    def __repr__(self):
        return f"{self.peer}-{self.name}"

    @property
    def system(self):
        """The part of the peer that ran."""
        return self.name.split("_")[0]


def mxnet(optimizer, kwargs):
    """MXNet 2.0 LAMB, LANS and LARS, and MXNet 1.9 LBSGD."""
    rate, decay = kwargs.pop("learning_rate"), kwargs.pop("wd", 0.0)
    clip, rescale = kwargs.pop("clip_gradient", None), kwargs.pop("rescale_grad", 1.0)
    fused = kwargs.pop("use_fused_step", True)
    bounds = (kwargs.pop("lower_bound", None), kwargs.pop("upper_bound", None))
    if optimizer == "LAMB":
        correction = "full" if kwargs.pop("bias_correction", True) else "none"
        own = lb.chain(
            lb.clip_by_value(clip),
            lb.lamb(rate, weight_decay=decay, param_norm_bounds=bounds, bias_correction=correction),
        )
    elif optimizer == "LANS":
        order = "simultaneous" if fused else "sequential"
        branch = lb.chain(
            lb.add_decayed_weights(decay), lb.scale_by_trust_ratio(param_norm_bounds=bounds)
        )
        clipped = lb.chain(
            lb.normalize_by_block_norm(),
            lb.clip_by_value(clip),
            lb.nesterov_split(branch, order=order, learning_rate=rate),
            lb.scale_by_learning_rate(rate),
        )
        plain = lb.lans(rate, weight_decay=decay, param_norm_bounds=bounds, order=order)
        own = clipped if clip else plain
    elif optimizer == "LARS":
        adapted, momentum = ~lb.matching("bias$", "scale$"), kwargs.pop("momentum")
        plain = lb.lars(rate, decay, eps=1e-8, trust_ratio_mask=adapted, momentum=momentum)
        clipped = lb.chain(
            lb.scale_by_lars(decay, eps=1e-8, trust_ratio_mask=adapted, clip_gradient=clip),
            lb.scale_by_learning_rate(rate),
            lb.accumulate_momentum(momentum),
        )
        own = clipped if clip else plain
    else:
        assert optimizer == "LBSGD"
        # MXNet sums micro-batches and rescales the mean; the mean of rescaled ones is the same.
        own = clipped_lbsgd(rate, clip, decay, kwargs) if clip else lbsgd(rate, decay, **kwargs)
        kwargs = {}
    assert not kwargs, kwargs
    return optax.chain(optax.scale(rescale), own)


def lbsgd(rate, decay, *, begin_epoch=0, **kwargs):
    """LBSGD whose state has counted the micro-batches of some epochs, as that of a run goes on."""
    begun = lb.lbsgd(rate, weight_decay=decay, **kwargs)
    counted = begin_epoch * kwargs["updates_per_epoch"]

    def init(params):
        return optax.tree.set(begun.init(params), micro_batches=jnp.int32(counted))

    return optax.GradientTransformation(init, begun.update)


def clipped_lbsgd(rate, clip, decay, kwargs):
    """LBSGD with a clip of the macro-batch, link by link."""
    scale = kwargs["batch_scale"]
    warmed_up = lb.large_batch_warmup(
        rate,
        batch_scale=scale,
        warmup_steps=kwargs["warmup_epochs"] * kwargs["updates_per_epoch"],
        strategy=kwargs["warmup_strategy"],
    )
    links = lb.chain(
        lb.clip_by_value(clip),
        lb.add_decayed_weights(decay),
        lb.scale_by_learning_rate(lambda step: warmed_up(scale * (step + 1))),
        lb.accumulate_momentum(kwargs["momentum"]),
    )
    return lb.accumulate_gradients(links, every=scale)


def timm(optimizer, kwargs, undecayed):
    """timm's Lamb and Lars: layers are adapted where they are decayed, unless always_adapt."""
    rate, decay = kwargs.pop("lr"), kwargs.pop("weight_decay")
    decayed = ~lb.matching(*undecayed) if undecayed else None
    if optimizer.endswith("Lamb"):
        own = lb.lamb(
            rate,
            weight_decay=decay,
            weight_decay_mask=decayed,
            trust_ratio_mask=None if kwargs.pop("always_adapt", False) else decayed,
            trust_ratio_bounds=(None, 1.0) if kwargs.pop("trust_clip", False) else None,
            bias_correction="full" if kwargs.pop("bias_correction", True) else "none",
            grad_averaging=kwargs.pop("grad_averaging", True),
            max_grad_norm=kwargs.pop("max_grad_norm", 1.0),
        )
    elif kwargs.pop("trust_clip", False):
        own = lb.chain(
            lb.scale_by_lars(decay, eps=1e-8, larc_learning_rate=rate),
            lb.accumulate_momentum(kwargs.pop("momentum")),
            lb.scale_by_learning_rate(rate),
        )
    else:
        own = lb.lars(rate, decay, eps=1e-8, learning_rate_in_momentum=False, **kwargs)
        kwargs = {}
    assert not kwargs, kwargs
    return own


def pytorch_optimizer(kwargs):
    """pytorch_optimizer's LARS: parameters of one axis are neither adapted nor decayed."""
    matrices = lb.at_least_ndim(2)
    return lb.lars(
        kwargs["lr"],
        kwargs["weight_decay"],
        weight_decay_mask=matrices,
        trust_ratio_mask=matrices,
        momentum=kwargs["momentum"],
        learning_rate_in_momentum=False,
    )


def tensorflow(optimizer, kwargs):
    """TensorFlow Addons LAMB, and the LAMB of the BERT-style TF1 scripts (arXiv v3)."""
    addons = optimizer.startswith("tensorflow_addons")
    rate = kwargs.pop("learning_rate")
    decay = kwargs.pop("weight_decay" if addons else "weight_decay_rate", 0.0)
    undecayed = kwargs.pop("exclude_from_weight_decay", None)
    unadapted = kwargs.pop("exclude_from_layer_adaptation", None)
    if addons and not unadapted:
        unadapted = undecayed
    assert not kwargs, kwargs
    return lb.lamb(
        rate,
        weight_decay=decay,
        weight_decay_mask=~lb.matching(*undecayed) if undecayed else None,
        trust_ratio_mask=~lb.matching(*unadapted) if unadapted else None,
        bias_correction="full" if addons else "none",
    )


def keras(kwargs):
    """Keras' LAMB, whose weight decay comes first and stands outside of the ratio."""
    rate, decay = kwargs.pop("learning_rate"), kwargs.pop("weight_decay", 0.0)
    b1, b2 = kwargs.pop("beta_1", 0.9), kwargs.pop("beta_2", 0.999)
    own = lb.chain(
        lb.clip_by_global_norm(kwargs.pop("global_clipnorm", None)),
        lb.scale_by_adam(b1, b2, kwargs.pop("epsilon", 1e-7)),
        lb.scale_by_trust_ratio(trust_coefficient=1 - rate * decay),
        lb.add_decayed_weights(decay),
        lb.scale_by_learning_rate(rate),
    )
    assert not kwargs, kwargs
    return own


def icefall(optimizer, kwargs):
    """Eve, Cain, ScaledAdam, and the corrected LearnedGradient."""
    factories = {
        "Eve": lb.eve,
        "Cain": lb.cain,
        "ScaledAdam": lb.scaled_adam,
        "LearnedGradient": lb.learned_gradient,
    }
    b1, b2 = kwargs.pop("betas", (0.9, 0.98))
    if optimizer.startswith("Learned") and LEARNED_SIZES & kwargs.keys():
        return learned_gradient(kwargs.pop("lr"), **kwargs)
    return factories[optimizer.split()[0]](kwargs.pop("lr"), b1=b1, b2=b2, **kwargs)


LEARNED_SIZES = {"meta_lr_scale", "param_max_rms", "size_lr_scale"}
"""What LearnedGradient, here, has no arguments for."""


def learned_gradient(
    rate,
    *,
    meta_lr_scale=1.0,
    param_min_rms=1e-5,
    param_max_rms=2.0,
    size_lr_scale=0.1,
    stacked=None,
    **matrices,
):
    """LearnedGradient, link by link, with icefall's default of `max_step_scale`."""
    return lb.sum_of(
        lb.chain(
            scale_by_learned_matrices(
                rate, meta_lr_scale=meta_lr_scale, max_step_scale=2.0, stacked=stacked, **matrices
            ),
            lb.scale_by_parameter_rms(param_min_rms, period=4, stacked=stacked),
            lb.scale_by_learning_rate(rate),
        ),
        lb.learn_log_scale(
            rate, b1=0.9, eps=1e-10, speed=size_lr_scale, period=4, stacked=stacked,
            rms_bounds=(param_min_rms, param_max_rms), at_bounds="return",
        ),
    )  # fmt: skip


def _translate(peer, case, dialects):
    if dialects is not None:
        name = case["dialect"]
        build = (muon_peers.DIALECTS | vision_peers.DIALECTS)[name]
        return build(case, dialects[name]["defaults"] | case["kwargs"])
    optimizer, kwargs = case["optimizer"], dict(case["kwargs"])
    if peer.startswith("mxnet"):
        return mxnet(optimizer, kwargs)
    if peer == "icefall":
        return icefall(optimizer, kwargs)
    if peer == "keras":
        return keras(kwargs)
    if optimizer.startswith("timm"):
        return timm(optimizer, kwargs, case["undecayed_group"])
    if optimizer.startswith("pytorch_optimizer"):
        return pytorch_optimizer(kwargs)
    return tensorflow(optimizer, kwargs)


def _tree(leaves, get):
    tree = {}
    for leaf in leaves:
        *path, last = leaf.split("/")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[last] = get(leaf)
    return tree


def load(peer):
    """All recorded runs of a peer."""
    recorded = json.loads((HERE / f"{peer}.json").read_text())
    cases = recorded["cases"]
    with np.load(HERE / f"{peer}.npz") as arrays:
        return [
            Case(
                peer,
                name,
                case["dtype"],
                *(
                    _tree(case["leaves"], lambda leaf, n=name, p=part: arrays[f"{n}:{p}:{leaf}"])
                    for part in ("params", "grads", "trajectory")
                ),
                optimizer=_translate(peer, case, recorded.get("dialects")),
            )
            for name, case in cases.items()
            if name != "_schedules" and (peer != "muon_peers" or not muon_peers.reason(name, case))
        ]


@functools.cache
def cases():
    """All recorded runs of all peers."""
    return [case for peer in PEERS for case in load(peer)]


def schedules(peer):
    """The recorded value tables of a peer."""
    return json.loads((HERE / f"{peer}.json").read_text())["cases"]["_schedules"]


def is_long(case):
    """Whether a run is left to the slow tests.

    Of each system one is not. Of what the others show, `tests/test_dialects.py` has the formulas.
    The two runs of LANS with a strong decay are far apart if its halves are taken in the other
    order: by a hundredth, and most others by less than their tolerance.
    """
    if case.peer == "torch_peers" or case.name in ("lans_fused_strong", "lans_step_strong"):
        return False
    if case.peer == "icefall":
        return case.name.startswith("learned_gradient") or case.name == "scaled_adam_bounds"
    return case is not next(x for x in cases() if (x.peer, x.system) == (case.peer, case.system))
