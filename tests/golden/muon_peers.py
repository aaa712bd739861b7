"""The Muon and the hyperball of public training repositories, in the words of this library."""

import json
import pathlib
import re

import jax
import numpy as np
import optax

import optax_largebatch as lb

NOT_REPLAYED = {
    "soap": "SOAP is not in this library.",
    "nvidia_soap": "SOAP is not in this library.",
}
"""Recorded dialects that the library does not have."""

RADIAL_BRAKE = (
    "RadialBrake lets the norm change by a part of what the step changes it by. It is not in this "
    "library: hyperball keeps the norm, and takes steps relative to it."
)
RUNS_NOT_REPLAYED = {
    "hook_radial_brake_adam": RADIAL_BRAKE,
    "hook_radial_brake_muon_decay": RADIAL_BRAKE,
    "hook_radial_brake_muon_default": RADIAL_BRAKE,
    "hook_radial_brake_muon_fixed_norm": RADIAL_BRAKE,
    "nvidia_namo": "NAMO is not in this library.",
}
"""Runs of the other dialects that the library cannot reproduce."""

COEFFICIENTS = json.loads(pathlib.Path(__file__).with_suffix(".json").read_text())["coefficients"]
NVIDIA_COEFFICIENTS = {
    "simple": "standard",
    "quintic": "dion",
    "polar_express": "polar_express",
    "cans": "cans",
    "cubic5": "cubic",
    "aol": "aol",
    "deepseekv4": "deepseek_v4",
}
"""The name here of each of NVIDIA's names."""

YOU = {"YOU_COEFFICIENTS": "dion"}
"""The name here of Dao-AILab's name."""

ADJUSTED = {
    "spectral_norm": {"shape_factor": "spectral_norm"},
    "rms_norm": {"consistent_rms": 0.2},
    None: {"shape_factor": "none"},
}
"""The factor of a matrix in Dion and Dao-AILab."""


def reason(name, case):
    """Why a recorded run is not replayed, None if it is."""
    return NOT_REPLAYED.get(case["dialect"]) or RUNS_NOT_REPLAYED.get(name)


def names(case, defaults):
    """What the calls in docs/dialects.md name, as it was in a recorded run."""
    own = defaults | case["kwargs"]
    rest = BESIDE.get(case["dialect"])
    found = {
        "lb": lb,
        "lr": rate(case),
        "wd": own.get("weight_decay", own.get("wd", 0.0)),
        "kept": kept(case, own),
        "decay_first": decay_first(case, own),
        "radius": own.get("hyperball_radius"),
        "adam": rest and rest(case, own),
        "hidden": hidden(case),
        "head": labelled(case, "adamh"),
        "torch_axes": torch_axes,
        "dion_polar_express": inside(COEFFICIENTS["dion_polar_express"], 1.02),
        "dao_polar_express": COEFFICIENTS["dao_polar_express"],
    }
    if case["dialect"] == "archscale_muonh":
        found["head"] = head_of_archscale(case, own)
    if "labels" in case:
        found["axes"], found["stacks"] = matrix_axes(case), stacks(case)
        found["clip_by_label"] = clip_each_label(case, own)
    return found


# Muon of PyTorch repositories.


def torch_axes(params):
    """The axes of PyTorch's weights, `(outputs, inputs)`; axes in front stack matrices."""
    return jax.tree.map(lambda x: (-1, -2) if x.ndim >= 2 else None, params)


def torch_muon(case, own):
    """`torch.optim.Muon`."""
    matched = {None: None, "original": None, "match_rms_adamw": 0.2}[own["adjust_lr_fn"]]
    return muon(
        case,
        own["weight_decay"],
        ns_coeffs=own["ns_coefficients"],
        ns_steps=own["ns_steps"],
        beta=own["momentum"],
        eps=own["eps"],
        eps_is_floor=True,
        nesterov=own["nesterov"],
        consistent_rms=matched,
    )


def jordan_muon(case, own):
    """Keller Jordan's Muon; a kernel of a convolution has the factor of its own two sides."""
    ours = muon(
        case,
        own["weight_decay"],
        beta=own["momentum"],
        eps=1e-7,
        others=adamw_of_jordan(case, own),
    )
    if "conv" not in case["leaves"]:
        return ours
    kernels = lb.chain(
        lb.orthogonalize_momentum(
            own["momentum"],
            eps=1e-7,
            bias_correction="none",
            matrix_axes={"conv": ((1, 2, 3), 0)},
        ),
        lb.scale_by_matrix_shape(matrix_axes={"conv": (3, 2)}),
        lb.add_decayed_weights(own["weight_decay"]),
        lb.scale_by_learning_rate(rate(case)),
    )
    return optax.partition(
        {"conv": kernels, "rest": ours},
        lambda params: {name: "conv" if name == "conv" else "rest" for name in params},
    )


def adamw_of_jordan(case, own):
    """The AdamW beside it, whose rate is its own."""
    numbers = {"betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0} | own["adam"]
    return adam(numbers["betas"], numbers["eps"], adam_rate(case), numbers["weight_decay"])


def moonlight_muon(case, own):
    """Moonlight's Muon."""
    return muon(
        case,
        own["wd"],
        ns_steps=own["ns_steps"],
        beta=own["momentum"],
        eps=1e-7,
        nesterov=own["nesterov"],
        grad_averaging=False,
        consistent_rms=0.2,
        others=adamw_of_moonlight(case, own),
    )


def adamw_of_moonlight(case, own):
    """The AdamW beside it, whose bias correction is a factor of the rate."""
    return adam(
        own["adamw_betas"], own["adamw_eps"], rate(case), own["wd"], bias_correction="step_size"
    )


def dion_muon(case, own):
    """The Muon in microsoft/dion, whose decay may be cautious."""
    return in_links(case, own, dion_direction(own), dion_scale(own))


def dion_normuon(case, own):
    """NorMuon in microsoft/dion; matrices are flattened for the iterations alone."""
    neurons = lb.normalize_neurons(own["muon_beta2"], matrix_axes=torch_axes)
    return in_links(case, own, dion_direction(own), neurons, dion_scale(own))


def dion_direction(own):
    """Its momentum and its iterations."""
    express = own["use_polar_express"]
    return lb.orthogonalize_momentum(
        ns_coeffs=inside(COEFFICIENTS["dion_polar_express"], 1.02) if express else "dion",
        beta=own["mu"],
        eps=own["epsilon"] / 1.02 if express else own["epsilon"],
        nesterov=own["nesterov"],
        bias_correction="none",
        grad_averaging=False,
        matrix_axes=flattened if own["flatten"] else torch_axes,
    )


def dion_scale(own):
    """Its factor of a matrix."""
    axes = flattened if own["flatten"] else torch_axes
    return lb.scale_by_matrix_shape(**ADJUSTED[own["adjust_lr"]], matrix_axes=axes)


def flattened(params):
    """The axes of PyTorch's weights, with all inputs of an output in one row of the weight."""
    return jax.tree.map(lambda x: (tuple(range(1, x.ndim)), 0), params)


def modded_normuon(case, own):
    """NorMuon in modded-nanogpt: a decay by the square of the rate, and banks of matrices."""
    rates = rate(case)
    of_each = own["per_matrix_lr_mul"] or [1.0]
    return optax.chain(
        lb.orthogonalize_momentum(
            ns_coeffs=inside(COEFFICIENTS["dion_polar_express"], 1.02),
            beta=own["momentum"],
            eps=1e-6 / 1.02,
            bias_correction="none",
            matrix_axes=torch_axes,
        ),
        lb.normalize_neurons(
            own["beta2"], eps=1e-10, side="longer", eps_is_floor=True, matrix_axes=torch_axes
        ),
        lb.add_decayed_weights(
            lambda step: rates(step) * own["weight_decay"] * own["wd_mul"], cautious=True
        ),
        lb.scale_by_matrix_shape(matrix_axes=torch_axes),
        optax.stateless_with_tree_map(
            lambda u, _: u * np.array(of_each).reshape(-1, 1, 1) if u.ndim == 3 else u
        ),
        lb.scale_by_learning_rate(lambda step: own["lr_mul"] * rates(step)),
    )


def in_links(case, own, *links):
    """A chain with the decay and the rates of a run."""
    decay = lb.add_decayed_weights(own["weight_decay"], cautious=own.get("cautious_wd", False))
    return lb.chain(*links, decay, lb.scale_by_learning_rate(rate(case)))


def dao_muon(case, own):
    """Dao-AILab's Muon; its iterations with Gram matrices give the same numbers."""
    preset = own["ns_coefficients_preset"]
    return muon(
        case,
        own["weight_decay"],
        ns_coeffs=COEFFICIENTS["dao_polar_express"] if preset is None else YOU[preset],
        beta=own["momentum"],
        eps=1e-7,
        nesterov=own["nesterov"],
        grad_averaging=False,
        **ADJUSTED[own["adjust_lr"]],
    )


def track3_muon(case, own):
    """Muon of the third track of modded-nanogpt."""
    return muon(
        case,
        own["weight_decay"],
        ns_coeffs=(2.0, -1.5, 0.5),
        ns_steps=12,
        beta=own["mu"],
        eps=1e-7,
    )


def track3_muonh(case, own):
    """MuonH of the third track of modded-nanogpt."""
    return lb.muonh(
        rate(case),
        ns_coeffs=(2.0, -1.5, 0.5),
        ns_steps=12,
        beta=own["mu"],
        eps=1e-7,
        bias_correction="none",
        matrix_axes=torch_axes,
    )


def archscale_muonh(case, own):
    """ArchScale's MuonH: the decay comes first, and the norm is the one after it."""
    return lb.chain(
        lb.muonh(
            rate(case),
            ns_coeffs="dion",
            beta=own["mu"],
            eps=own["epsilon"],
            nesterov=own["nesterov"],
            bias_correction="none",
            grad_averaging=False,
            b1=own["betas"][0],
            b2=own["betas"][1],
            adam_eps=own["epsilon"],
            others=adam_of_archscale(case, own),
            adamh_mask=head_of_archscale(case, own),
            matrix_mask=hidden(case),
            matrix_axes=torch_axes,
        ),
        decay_first(case, own),
    )


def head_of_archscale(case, own):
    """The matrices that Adam moves on their spheres."""
    return only({*case["adam_leaves"]} - {*own["excluded"], "gain"})


def adam_of_archscale(case, own):
    """The Adam beside it; `decay_first` makes its steps shorter, too."""
    rates, shares = rate(case), kept(case, own)
    return adam(own["betas"], own["epsilon"], lambda step: rates(step) / shares(step))


# Muon and the hooks of NVIDIA's Emerging-Optimizers.


def nvidia_muon(case, own):
    """Muon with one of four decays."""
    decay, rates = own["weight_decay"], rate(case)
    method = own["weight_decay_method"]
    if method == "independent":  # w loses wd * w, whatever the rate

        def decays(step):
            return decay / rates(step)
    elif method == "palm":  # w loses lr**2 * wd * w

        def decays(step):
            return decay * rates(step)
    else:
        decays = decay if method == "decoupled" else 0.0
    ours = muon(case, decays, eps_is_floor=True, **nvidia_direction(own), **nvidia_scale(own))
    return lb.chain(lb.add_decayed_weights(decay), ours) if method == "l2" else ours


def nvidia_adaptive_muon(case, own):
    """Its NorMuon and AdaMuon."""
    assert own["weight_decay_method"] == "decoupled"
    neurons = lb.normalize_neurons(
        own["beta2"], eps=own["eps"], side="longer", eps_is_floor=True, matrix_axes=torch_axes
    )
    if own["moment2_method"] == "adamuon":
        neurons = lb.scale_by_adam(0.0, own["beta2"], own["eps"], bias_correction="none")
    scale = lb.scale_by_matrix_shape(**nvidia_scale(own), matrix_axes=torch_axes)
    return in_links(case, own, nvidia_orthogonalization(own), neurons, scale)


def nvidia_muon_hyperball(case, own):
    """MuonHyperball: one given radius, and a decay in front of the step."""
    decay, rates, shares = own["weight_decay"], rate(case), kept(case, own)
    method = own["weight_decay_method"]

    def longer(step):
        return rates(step) / shares(step)

    ours = lb.muonh(
        longer if method == "decoupled" else rates,  # the step is as long, and w is shorter
        bias_correction="none",
        radius=own["hyperball_radius"],
        matrix_axes=torch_axes,
        **nvidia_direction(own),
    )
    return lb.chain(lb.add_decayed_weights(decay), ours) if method == "l2" else ours


def nvidia_hook_muon(case, own):
    """Muon with a hook."""
    if own["hook"] == "hyperball":
        radius = own["hook_kwargs"]["radius"]
        return nvidia_muon_hyperball(case, own | {"hyperball_radius": radius})
    assert own["hook"] == "relative_update"
    return relative_update(case, own, nvidia_orthogonalization(own))


def nvidia_hook_adam(case, own):
    """Adam with a hook."""
    assert own["correct_bias"]
    assert not own["nesterov"]
    if own["hook"] == "hyperball":
        assert not own["weight_decay"]
        return lb.adamh(
            rate(case),
            b1=own["betas"][0],
            b2=own["betas"][1],
            eps=own["eps"],
            radius=own["hook_kwargs"]["radius"],
            adamh_mask=lb.at_least_ndim(0),
        )
    assert own["hook"] == "relative_update"
    return relative_update(case, own, lb.scale_by_adam(*own["betas"], own["eps"]))


def relative_update(case, own, direction):
    """RelativeUpdateHook: the trust ratio, after the decay."""
    ours = lb.chain(
        direction,
        lb.scale_by_trust_ratio(),
        lb.scale_by_learning_rate(rate(case)),
        decay_first(case, own),
    )
    return zeros_stay(case, ours)


def zeros_stay(case, ours):
    """A parameter of zeros stays there in NVIDIA's hook and in Marin, and moves here."""
    if not case["zero_at_start"]:
        return ours
    zeros = only(case["zero_at_start"]).mask
    return optax.chain(ours, optax.masked(optax.set_to_zero(), zeros))


def nvidia_direction(own):
    """The arguments of its momentum and its iterations."""
    return {
        "ns_coeffs": NVIDIA_COEFFICIENTS[own["coefficient_type"]],
        "ns_steps": own["num_ns_steps"],
        "beta": own["momentum"],
        "eps": 1e-15,
        "nesterov": own["nesterov"],
    }


def nvidia_orthogonalization(own):
    """Its momentum and its iterations as a link."""
    return lb.orthogonalize_momentum(
        bias_correction="none", eps_is_floor=True, matrix_axes=torch_axes, **nvidia_direction(own)
    )


def nvidia_scale(own):
    """The arguments of its factor of a matrix."""
    extra, mode = own["extra_scale_factor"], own["scale_mode"]
    if mode == "spectral":
        return {"consistent_rms": extra}
    assert extra == 1.0
    return {"shape_factor": {"unit_rms_norm": "spectral_norm", "shape_scaling": "jordan"}[mode]}


# Marin: Levanter, whose weights are (outputs, inputs), and Grug, whose weights are (inputs,
# outputs). Each parameter has a label.


def marin_muon(case, own):
    """Levanter's Muon."""
    return lb.chain(
        clip_each_label(case, own),
        lb.muon(
            rate(case),
            levanter_coefficients(own),
            None,
            own["momentum"],
            own["muon_epsilon"],
            own["weight_decay"],
            nesterov=own["nesterov"],
            bias_correction="none",
            grad_averaging=False,
            consistent_rms=0.2 if own["use_kimi_scaling"] else None,
            others=adamw_of_marin(case, own),
            matrix_mask=labelled(case, "muon"),
            matrix_axes=matrix_axes(case),
            stacked=stacks(case),
        ),
    )


def adamw_of_marin(case, own):
    """The AdamW beside it, which does not decay all its parameters."""
    decay, of_adam = own["weight_decay"], own["adam_weight_decay"]
    return adam(
        (own["beta1"], own["beta2"]),
        own["epsilon"],
        adam_rate(case),
        decay if of_adam is None else of_adam,
        only(case["decayed"]),
    )


def marin_muonh(case, own):
    """MuonH of Levanter and of Grug, whose norms need not be those of the matrices."""
    ours = lb.chain(
        clip_each_label(case, own),
        lb.muonh(
            rate(case),
            ns_coeffs=levanter_coefficients(own),
            ns_steps=None,
            beta=own["momentum"],
            eps=own["muon_epsilon"],
            nesterov=own["nesterov"],
            bias_correction="none",
            grad_averaging=False,
            b1=own["beta1"],
            b2=own["beta2"],
            adam_eps=own["epsilon"],
            others=adam_of_marin(case, own),
            adamh_mask=labelled(case, "adamh"),
            matrix_mask=labelled(case, "muonh"),
            matrix_axes=matrix_axes(case),
            stacked=stacks(case),
        ),
    )
    return zeros_stay(case, ours)


def marin_adamh(case, own):
    """Levanter's AdamH."""
    ours = lb.chain(
        clip_each_label(case, own),
        lb.adamh(
            rate(case),
            b1=own["beta1"],
            b2=own["beta2"],
            eps=own["epsilon"],
            others=adam_of_marin(case, own),
            adamh_mask=labelled(case, "adamh"),
            stacked=stacks(case),
        ),
    )
    return zeros_stay(case, ours)


def adam_of_marin(case, own):
    """The Adam beside them; Grug's gates and routers decay less and less."""
    decay, steps = own.get("gate_router_weight_decay", 0.0), case["num_train_steps"]
    decays = lb.values_schedule(
        # Grug computes them in float32, also beside parameters in float64.
        [np.float32(decay) * (1 - np.float32(step) / np.float32(steps)) for step in range(steps)]
    )
    return adam(
        (own["beta1"], own["beta2"]),
        own["epsilon"],
        adam_rate(case),
        decays if decay else 0.0,
        lb.matching("attn_gate$", "router$") if decay else None,
    )


def clip_each_label(case, own):
    """The clip of all gradients but Muon's, for each label by the norm of its own parameters."""
    clip = optax.clip_by_global_norm(own["max_grad_norm"] or np.inf)
    clips = dict.fromkeys(case["labels"].values(), clip) | {"muon": optax.identity()}
    return optax.partition(clips, lambda params: labels_of(case, params))


def labels_of(case, params):
    """The label of each parameter."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: case["labels"]["/".join(key.key for key in path)], params
    )


def labelled(case, label):
    """The parameters that have a label."""
    return only(leaf for leaf, own in case.get("labels", {}).items() if own == label)


def matrix_axes(case):
    """The rows and columns of each matrix; Levanter's outputs come first."""
    pairs = {}
    for leaf, view in case["views"].items():
        _, first, last = map(tuple, view["matrix"])
        is_levanter = case["dialect"] != "marin_grug_muonh"
        pairs[whole(leaf)] = (last, first) if is_levanter else (first, last)
    return pairs


def stacks(case):
    """The axes that none of the norms is over."""
    axes = {whole(leaf): None for leaf in case.get("labels", {})}  # no stacks, whatever their shape
    for leaf, view in case["views"].items():
        ndim = sum(map(len, view["matrix"]))
        own = tuple(axis for axis in range(ndim) if axis not in view.get("norm_axes", range(ndim)))
        if own:
            axes[whole(leaf)] = own
        if "expert" in leaf:
            axes[leaf] = None  # Marin's experts share a norm
    return lb.stacked_layers(axes)


def levanter_coefficients(own):
    """As many of the published coefficients as iterations; after the last the first comes again."""
    published = COEFFICIENTS["levanter"][own["coefficient_type"]]
    return [published[step % len(published)] for step in range(own["backend_steps"])]


# What several dialects have in common.


def muon(case, decay, **settings):
    """Muon without bias correction, with the rates of a run."""
    return lb.muon(
        rate(case),
        weight_decay=decay,
        bias_correction="none",
        matrix_mask=hidden(case),
        matrix_axes=torch_axes,
        **settings,
    )


def adam(betas, eps, rates, decay=0.0, decayed=None, bias_correction="full"):
    """AdamW."""
    b1, b2 = betas
    return lb.chain(
        lb.scale_by_adam(b1, b2, eps, bias_correction=bias_correction),
        lb.add_decayed_weights(decay, decayed),
        lb.scale_by_learning_rate(rates),
    )


def rate(case):
    """The learning rate as a function of the step."""
    return lb.values_schedule(case["rates"])


def adam_rate(case):
    """That of the Adam beside it."""
    return lb.values_schedule(case["adam_rates"] or case["rates"])


def kept(case, own):
    """The share of a parameter that its decay leaves in a step."""
    rates, decay = np.asarray(case["rates"]), own.get("weight_decay", 0.0)
    return lb.values_schedule(1 - rates * decay)


def decay_first(case, own):
    """A decay in front of a step, put after it.

    Steps that are relative to the parameter shrink with it, so it is all the same whether
    the parameter is multiplied by `kept` before the step or after it.
    """
    shares = kept(case, own)
    return lb.chain(
        optax.scale(-1.0),
        lb.add_decayed_weights(lambda step: 1 / shares(step) - 1),
        lb.scale_by_learning_rate(shares),
    )


def hidden(case):
    """The parameters that Muon moves, if they are matrices; None for all."""
    if "labels" in case:
        return labelled(case, "muon" if case["dialect"] == "marin_muon" else "muonh")
    return ~lb.matching(*map(whole, case["adam_leaves"])) if case["adam_leaves"] else None


def only(leaves):
    """These leaves and no others."""
    patterns = [*map(whole, leaves)]
    return lb.matching(*patterns) if patterns else None


def whole(leaf):
    """The pattern of one leaf's whole name."""
    return f"^{re.escape(leaf)}$"


def inside(triples, safety):
    """The first triple of a matrix that is divided by its norm and a safety factor."""
    (a, b, c), *rest = triples
    return [(a / safety, b / safety**3, c / safety**5), *rest]


DIALECTS = {
    build.__name__: build
    for build in (
        archscale_muonh, dao_muon, dion_muon, dion_normuon, jordan_muon, marin_adamh, marin_muon,
        marin_muonh, modded_normuon, moonlight_muon, nvidia_adaptive_muon, nvidia_hook_adam,
        nvidia_hook_muon, nvidia_muon, nvidia_muon_hyperball, torch_muon, track3_muon, track3_muonh,
    )
}  # fmt: skip
DIALECTS["marin_grug_muonh"] = marin_muonh

BESIDE = {
    "archscale_muonh": adam_of_archscale,
    "jordan_muon": adamw_of_jordan,
    "marin_adamh": adam_of_marin,
    "marin_grug_muonh": adam_of_marin,
    "marin_muon": adamw_of_marin,
    "marin_muonh": adam_of_marin,
    "moonlight_muon": adamw_of_moonlight,
}
"""The optimizer of the parameters that are left to another one."""
