"""The LARS, LARC and LAMB inside public training repositories, in the words of this library."""

import re

import jax
import jax.numpy as jnp
import optax

import optax_largebatch as lb
from tests.golden.muon_peers import whole

MATRICES = lb.at_least_ndim(2)
ALL_BUT_VECTORS = MATRICES | ~lb.at_least_ndim(1)
"""All but leaves of exactly one axis: a leaf of no axes is among them."""


def fair_lars(decayed, adapted):
    """The LARS of Facebook's repositories, with the leaves that a dialect decays and adapts."""

    def build(case, own):
        eta = own["eta"] if "eta" in own else own["trust_coefficient"]
        rates = case["rates"]
        return lb.lars(
            0.0 if rates is None else lb.values_schedule(rates),
            own["weight_decay"],
            decayed,
            eta,
            trust_ratio_mask=adapted,
            momentum=own["momentum"],
            denominator="update",
            learning_rate_in_momentum=False,
            groups=rates_of_groups(case) if rates is None else None,
        )

    return build


def barlow_lars(case, own):
    """The same with two switches: booleans, or, in VICReg, functions of the leaf."""
    decayed = ALL_BUT_VECTORS if own["weight_decay_filter"] else None
    adapted = ALL_BUT_VECTORS if own["lars_adaptation_filter"] else None
    return fair_lars(decayed, adapted)(case, own)


def either(rule, other):
    """The rule, or the other one where there is none."""
    return other if rule is None else rule


def vissl_lars(case, own):
    """The same with a switch that stops the ratio and not the decay."""
    return fair_lars(None, ALL_BUT_VECTORS if own["exclude_bias_and_norm"] else None)(case, own)


def byol_lars(case, own):
    """The same, with filters that spare biases and what belongs to a normalisation."""
    kernels = ~lb.matching("bias$", "norm")
    decayed = kernels if own["weight_decay_filter"] else None
    adapted = kernels if own["lars_adaptation_filter"] else None
    return fair_lars(decayed, adapted)(case, own)


def simclr_lars(case, own):
    """SimCLR, whose second list falls back to the first; TF2 adds `:0` to the names."""
    decayed = excluding(own["exclude_from_weight_decay"], case)
    adapted = either(excluding(own["exclude_from_layer_adaptation"], case), decayed)
    rate, nesterov = lb.values_schedule(case["rates"]), own["use_nesterov"]
    if own["classic_momentum"]:
        return lb.lars(
            rate, own["weight_decay"], decayed, own["eeta"], 0.0, adapted,
            own["momentum"], nesterov, denominator="update",
        )  # fmt: skip
    return lb.chain(
        lb.add_decayed_weights(own["weight_decay"], decayed),
        lb.accumulate_momentum(own["momentum"], nesterov=nesterov),
        lb.scale_by_trust_ratio(trust_coefficient=own["eeta"], trust_ratio_mask=adapted),
        lb.scale_by_learning_rate(rate),
    )


def apex_larc(case, own):
    """Apex LARC in front of PyTorch's SGD."""
    return lb.larc(
        lb.values_schedule(case["rates"]),
        weight_decay=own["weight_decay"],
        weight_decay_mask=decayed_groups(case),
        trust_coefficient=own["trust_coefficient"],
        eps=own["eps"],
        momentum=own["momentum"],
        nesterov=own["nesterov"],
        clip=own["clip"],
    )


def solo_lars(case, own):
    """solo-learn: LARC under another name, with a switch for biases and norms."""
    rate = lb.values_schedule(case["rates"])
    matrices = ALL_BUT_VECTORS if own["exclude_bias_n_norm"] else None
    return lb.chain(
        lb.scale_by_lars(
            own["weight_decay"], weight_decay_mask=either(matrices, decayed_groups(case)),
            trust_coefficient=own["eta"], eps=own["eps"], trust_ratio_mask=matrices,
            zero_ratio="gradient", larc_learning_rate=rate if own["clip_lr"] else None,
        ),
        optax.scale_by_schedule(first_and_others(own["dampening"])),
        lb.accumulate_momentum(own["momentum"], nesterov=own["nesterov"]),
        lb.scale_by_learning_rate(rate),
    )  # fmt: skip


def mmpretrain_lars(case, own):
    """mmpretrain: the norms apart, the rate in the buffer, `lars_exclude` without the ratio."""
    excluded = [
        leaf for group in case["groups"] if "lars_exclude" in group for leaf in group["leaves"]
    ]
    rate, weight = lb.values_schedule(case["rates"]), first_and_others(own["dampening"])
    return lb.lars(
        lambda step: rate(step) * weight(step), own["weight_decay"], decayed_groups(case),
        own["eta"], own["eps"], all_but(excluded), own["momentum"], own["nesterov"],
    )  # fmt: skip


def mmpretrain_lamb(case, own):
    """timm's LAMB of 2021: leaves are adapted where they are decayed."""
    assert not own["always_adapt"]
    decayed = decayed_groups(case)
    return lamb(case, own, decayed, decayed, max_grad_norm=own["max_grad_norm"])


def deepspeed_onebit_lamb(case, own):
    """DeepSpeed's uncompressed stage: the first call drops its gradient."""
    case = case | {"rates": case["rates"][1:]}
    own = own | {"bias_correction": False}  # an argument that it does not look at
    bounds = (own["min_coeff"], own["max_coeff"])
    inner = lamb(case, own, decayed_groups(case), trust_ratio_bounds=bounds)
    return optax.conditionally_mask(inner, lambda step: step > 0)


def tensorflow_lamb(bias_correction, falls_back):
    """ALBERT's and NVIDIA's LAMB in TensorFlow 1."""

    def build(case, own):
        decayed = excluding(own["exclude_from_weight_decay"], case)
        adapted = excluding(own.get("exclude_from_layer_adaptation"), case)
        own = {
            "betas": (own["beta_1"], own["beta_2"]),
            "eps": own["epsilon"],
            "weight_decay": own["weight_decay_rate"],
            "bias_correction": bias_correction,
        }
        return lamb(case, own, decayed, either(adapted, decayed if falls_back else None))

    return build


def perceiver_lamb(case, own):
    """Perceiver IO: decay spares biases and norms, the ratio spares nothing."""
    clip = own["max_norm"] if own["max_norm"] > 0 else None
    decayed = ~lb.matching("bias$", "norm")
    numbers = own["lamb_kwargs"]
    own = own | {"betas": (numbers["b1"], numbers["b2"]), "eps": numbers["eps"]}
    return lamb(case, own, decayed, max_grad_norm=clip)


def transformer_xl_lamb(case, own):
    """NVIDIA's Transformer-XL; with `adam` there is no ratio."""
    own = own | {"bias_correction": False}
    adapted = (lambda params: False) if own["adam"] else None
    bounds = (None, 10.0)
    return lamb(
        case, own, decayed_groups(case), adapted, param_norm_bounds=bounds,
        trust_ratio_eps=own["eps"],
    )  # fmt: skip


def transformer_xl_jitlamb(case, own):
    """The same compiled by TorchScript, which rounds the ratio, and its product with the rate."""
    ratio = lb.scale_by_trust_ratio(eps=own["eps"], param_norm_bounds=(None, 10.0))
    rate = lb.values_schedule(case["rates"])

    def update(updates, state, params):
        _, state, count = *ratio.update(updates, state[0], params), state[1]
        factors = rate(count).astype("float32") * state.trust_ratios.astype("float32")
        leaves, structure = jax.tree.flatten(updates)
        steps = [
            -factor.astype(leaf.dtype) * leaf for factor, leaf in zip(factors, leaves, strict=True)
        ]
        return structure.unflatten(steps), (state, count + 1)

    return lb.chain(
        lb.scale_by_adam(*own["betas"], own["eps"], bias_correction="none"),
        lb.add_decayed_weights(own["weight_decay"]),
        optax.GradientTransformation(lambda p: (ratio.init(p), jnp.zeros((), int)), update),
    )


def lamb(case, own, decayed, adapted=None, **settings):
    """LAMB with the numbers of a run."""
    return lb.lamb(
        lb.values_schedule(case["rates"]),
        *own["betas"],
        own["eps"],
        weight_decay=own["weight_decay"],
        weight_decay_mask=decayed,
        trust_ratio_mask=adapted,
        bias_correction="full" if own.get("bias_correction", True) else "none",
        **settings,
    )


def first_and_others(dampening):
    """PyTorch's dampening: the weight in the buffer of the first step, and of those that follow."""
    return lambda step: jnp.where(step == 0, 1.0, 1.0 - dampening)


def excluding(patterns, case):
    """The leaves in whose name no pattern is found; SimCLR in TensorFlow 2 adds `:0` to it."""
    end = ":0" if case["dialect"] == "simclr_lars" else ""
    return all_but(
        [
            leaf
            for leaf in case["leaves"]
            if any(re.search(pattern, leaf + end) for pattern in patterns or [])
        ]
    )


def decayed_groups(case):
    """The leaves of the groups that do not set the decay to 0."""
    return all_but(
        [leaf for group in case["groups"] if "weight_decay" in group for leaf in group["leaves"]]
    )


def rates_of_groups(case):
    """A learning rate for each group."""
    return lb.param_groups(
        *(
            {
                "params": lb.matching(*map(whole, group["leaves"])),
                "learning_rate": lb.values_schedule(group["rates"]),
            }
            for group in case["groups"]
        )
    )


def all_but(leaves):
    """All leaves but these."""
    return ~lb.matching(*map(whole, leaves)) if leaves else None


DIALECTS = {
    "barlow_lars": barlow_lars,
    "vicreg_lars": barlow_lars,
    "mocov3_lars": fair_lars(MATRICES, MATRICES),
    "mae_lars": fair_lars(MATRICES, MATRICES),
    "dino_lars": fair_lars(ALL_BUT_VECTORS, ALL_BUT_VECTORS),
    "vissl_lars": vissl_lars,
    "byol_lars": byol_lars,
    "simclr_lars": simclr_lars,
    "simclr_tf1_lars": simclr_lars,
    "apex_larc": apex_larc,
    "solo_lars": solo_lars,
    "mmpretrain_lars": mmpretrain_lars,
    "mmpretrain_lamb": mmpretrain_lamb,
    "txl_jitlamb": transformer_xl_jitlamb,
    "txl_lamb": transformer_xl_lamb,
    "albert_lamb": tensorflow_lamb(bias_correction=False, falls_back=True),
    "nvidia_bert_tf_lamb": tensorflow_lamb(bias_correction=True, falls_back=False),
    "perceiver_lamb": perceiver_lamb,
    "deepspeed_onebit_lamb_warmup": deepspeed_onebit_lamb,
}
