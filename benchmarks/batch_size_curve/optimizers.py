"""The optimizers: how each is built, and where its learning rates are centred.

All have a momentum of 0.9, unless their name says another, and, where they have one, a second
moment with a decay rate of 0.98. All get the same warm-up and the same rule: biases and scales are
neither decayed nor adapted.
`scaled_adam`, `cain` and `learned_gradient` have no weight decay and nothing to exclude; the floor
under the size of a parameter, which moves biases that start at 0, is 0.01, because the runs are
short (see `docs/icefall.md`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

import optax_largebatch as lb

KERNELS = ~lb.matching("bias|scale")
MOMENTUM, B2, FLOOR = 0.9, 0.98, 0.01
LAYERWISE = {"weight_decay_mask": KERNELS, "trust_ratio_mask": KERNELS}

Build = Callable[[optax.Schedule, jax.Array, lb.Stacked | None], optax.GradientTransformation]


class Optimizer(NamedTuple):
    """An optimizer, to be tuned."""

    centre: float
    """The middle of the range of learning rates, the same for all networks and batch sizes."""
    build: Build
    """A function from a schedule of the learning rate, a weight decay, and stacked layers."""
    decays: bool = True
    """Whether it has a weight decay."""


def sgd(rate: optax.Schedule, decay: jax.Array, _: Any) -> optax.GradientTransformation:
    """SGD with Nesterov's momentum."""
    return optax.chain(
        optax.add_decayed_weights(decay, mask=KERNELS.mask),
        optax.sgd(rate, momentum=MOMENTUM, nesterov=True),
    )


def adamw(momentum: float) -> Build:
    """Adam with decoupled decay, and a given momentum."""
    return lambda rate, decay, _: optax.adamw(
        rate, momentum, B2, 1e-8, 0.0, None, decay, KERNELS.mask
    )


def lamb(momentum: float) -> Build:
    """LAMB, with a given momentum."""
    return lambda rate, decay, stacked: lb.lamb(
        rate, momentum, B2, weight_decay=decay, stacked=stacked, **LAYERWISE
    )


def lans(momentum: float) -> Build:
    """LANS, with a given momentum."""
    return lambda rate, decay, stacked: lb.lans(
        rate, b1=momentum, b2=B2, weight_decay=decay, stacked=stacked, **LAYERWISE
    )


# `lars` moves what it does not adapt at the learning rate itself. With the paper's coefficient,
# 0.001, one large enough for the kernels is far too large for the biases. `lbsgd` is that of the
# strategy "lars": with the others it is SGD with another warm-up.
KNOWN = {
    "sgd": Optimizer(0.1, sgd),
    "adamw": Optimizer(0.01, adamw(MOMENTUM)),
    "lamb": Optimizer(0.02, lamb(MOMENTUM)),
    "lans": Optimizer(0.02, lans(MOMENTUM)),
    "lars": Optimizer(
        0.1,
        lambda rate, decay, stacked: lb.lars(
            rate,
            decay,
            trust_coefficient=0.1,
            momentum=MOMENTUM,
            nesterov=True,
            stacked=stacked,
            **LAYERWISE,
        ),
    ),
    "lbsgd": Optimizer(
        0.01,
        lambda rate, decay, stacked: lb.lbsgd(
            rate,
            momentum=MOMENTUM,
            weight_decay=decay,
            warmup_strategy="lars",
            stacked=stacked,
            **LAYERWISE,
        ),
    ),
    "scaled_adam": Optimizer(
        0.05,
        lambda rate, _, stacked: lb.scaled_adam(
            rate, b1=MOMENTUM, b2=B2, param_min_rms=FLOOR, clipping_scale=2.0, stacked=stacked
        ),
        decays=False,
    ),
    "eve": Optimizer(
        0.01,
        lambda rate, decay, stacked: lb.eve(
            rate,
            b1=MOMENTUM,
            b2=B2,
            eps=1e-8,
            weight_decay=decay,
            weight_decay_mask=KERNELS,
            stacked=stacked,
        ),
    ),
    "cain": Optimizer(
        0.1,
        lambda rate, _, stacked: lb.cain(rate, b1=MOMENTUM, b2=B2, rms_eps=FLOOR, stacked=stacked),
        decays=False,
    ),
    "learned_gradient": Optimizer(
        0.1,
        lambda rate, _, stacked: lb.learned_gradient(
            rate, b1=MOMENTUM, b2=B2, param_min_rms=FLOOR, stacked=stacked
        ),
        decays=False,
    ),
}


def nadamw(rate: optax.Schedule, decay: jax.Array, _: Any) -> optax.GradientTransformation:
    """Adam with Nesterov's momentum."""
    return optax.nadamw(rate, MOMENTUM, B2, 1e-8, 0.0, None, decay, KERNELS.mask)


def muon(momentum: float) -> Build:
    """Orthogonalised momentum for matrices, Adam for the rest, at one learning rate."""
    return lambda rate, decay, _: optax.contrib.muon(
        rate,
        beta=momentum,
        weight_decay=decay,
        weight_decay_mask=KERNELS.mask,
        adam_b1=momentum,
        adam_b2=B2,
    )


def muon_with_trust_ratio(
    rate: optax.Schedule, decay: jax.Array, stacked: Any
) -> optax.GradientTransformation:
    """Muon whose steps are as long as LAMB's."""
    return lb.muon(
        rate,
        beta=MOMENTUM,
        weight_decay=decay,
        weight_decay_mask=KERNELS,
        trust_ratio=True,
        others=adam_of_muon(rate),
        stacked=stacked,
    )


def adam_of_muon(rate: optax.Schedule) -> optax.GradientTransformation:
    """The optimizer of `optax.contrib.muon` for parameters that are no matrices."""
    return lb.chain(lb.scale_by_adam(MOMENTUM, B2, nesterov=True), lb.scale_by_learning_rate(rate))


def muon_of_layers(others: Build) -> Build:
    """Muon for the matrices of the layers, at rates like those of Adam; the rest by another."""
    return lambda rate, decay, stacked: lb.muon(
        rate,
        beta=MOMENTUM,
        weight_decay=decay,
        consistent_rms=0.2,
        others=others(rate, decay, stacked),
        matrix_mask=~lb.matching("embedding|head"),
        stacked=stacked,
    )


def lans_without_nesterov(
    rate: optax.Schedule, decay: jax.Array, stacked: Any
) -> optax.GradientTransformation:
    """The direction of the momentum alone: LAMB on normalised gradients."""
    by_lamb = lamb(MOMENTUM)(rate, decay, stacked)
    return optax.chain(lb.normalize_by_block_norm(stacked=stacked), by_lamb)


def lans_without_normalization(
    rate: optax.Schedule, decay: jax.Array, stacked: Any
) -> optax.GradientTransformation:
    """On the gradients as they are: LAMB with Nesterov's momentum."""
    adapted = lb.chain(
        lb.add_decayed_weights(decay, KERNELS, stacked=stacked),
        lb.scale_by_trust_ratio(trust_ratio_mask=KERNELS, stacked=stacked),
    )
    return lb.chain(lb.nesterov_split(adapted, b1=MOMENTUM, b2=B2), lb.scale_by_learning_rate(rate))


def lans_without_trust_ratio(
    rate: optax.Schedule, decay: jax.Array, stacked: Any
) -> optax.GradientTransformation:
    """Adam with Nesterov's momentum on normalised gradients."""
    return lb.lans(
        rate,
        b1=MOMENTUM,
        b2=B2,
        weight_decay=decay,
        weight_decay_mask=KERNELS,
        trust_ratio_mask=lambda params: False,
        stacked=stacked,
    )


# From AdamW to LANS, each step one change, on two ways; and what else is at hand. A further control
# is a line here.
CONTROLS = {
    "nadamw": Optimizer(0.01, nadamw),
    "muon": Optimizer(0.02, muon(MOMENTUM)),
    "muon_with_trust_ratio": Optimizer(0.02, muon_with_trust_ratio),
    "muon_and_adamw": Optimizer(0.01, muon_of_layers(adamw(MOMENTUM))),
    "muon_and_lamb": Optimizer(0.02, muon_of_layers(lamb(MOMENTUM))),
    "lans_without_nesterov": Optimizer(0.02, lans_without_nesterov),
    "lans_without_normalization": Optimizer(0.02, lans_without_normalization),
    "lans_without_trust_ratio": Optimizer(0.01, lans_without_trust_ratio),
    "adamw_momentum_0.8": Optimizer(0.01, adamw(0.8)),
    "adamw_momentum_0.95": Optimizer(0.01, adamw(0.95)),
    "lamb_momentum_0.8": Optimizer(0.02, lamb(0.8)),
    "lans_momentum_0.8": Optimizer(0.02, lans(0.8)),
    "muon_momentum_0.8": Optimizer(0.02, muon(0.8)),
}

# The same, told nothing of the stack: one norm for all its layers.
ONE_NORM = {
    "lamb_one_norm": Optimizer(0.02, lambda rate, decay, _: lamb(MOMENTUM)(rate, decay, None)),
    "lans_one_norm": Optimizer(0.02, lambda rate, decay, _: lans(MOMENTUM)(rate, decay, None)),
}
OPTIMIZERS = KNOWN | CONTROLS | ONE_NORM


def warmed_up(rate: jax.Array, warmup_steps: int) -> optax.Schedule:
    """A learning rate that grows in a straight line to `rate` and stays there.

    It does not decay: a decay would need to know beforehand how many steps the target takes.
    """
    return lambda step: rate * jnp.minimum((step + 1) / warmup_steps, 1)
