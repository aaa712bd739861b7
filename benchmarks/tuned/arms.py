"""The optimizers: how each is built from a learning rate, a weight decay and a momentum.

All have the same second moment and the same rule: biases and scales are neither decayed nor
adapted. Muon and MuonH move the matrices of the layers; embedding and head are AdamW's or Adam's.
MuonH has no weight decay.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import optax

import optax_largebatch as lb

KERNELS = ~lb.matching("bias|scale")
LAYERS = ~lb.matching("embedding|head")
LAYERWISE = {"weight_decay_mask": KERNELS, "trust_ratio_mask": KERNELS}
B2, EPS = 0.98, 1e-8

Build = Callable[
    [optax.Schedule, optax.Schedule, Any, lb.Stacked | None], optax.GradientTransformation
]


class Arm(NamedTuple):
    """An optimizer, to be tuned."""

    centre: float
    """The middle of the range of learning rates, the same for all networks and batch sizes."""
    build: Build
    """A function from schedules of rate and decay, a momentum or a schedule, and stacked layers."""
    decays: bool = True
    """Whether it has a weight decay."""


def adamw(
    rate: optax.Schedule, decay: optax.Schedule, momentum: Any, stacked: lb.Stacked | None
) -> optax.GradientTransformation:
    """Adam with decoupled decay."""
    return lb.chain(
        lb.scale_by_adam(momentum, B2, EPS),
        lb.add_decayed_weights(decay, KERNELS, stacked=stacked),
        lb.scale_by_learning_rate(rate),
    )


def muon(
    rate: optax.Schedule, decay: optax.Schedule, momentum: Any, stacked: lb.Stacked | None
) -> optax.GradientTransformation:
    """Muon for the matrices of the layers, in steps as long as Adam's; AdamW for the rest."""
    return lb.muon(
        rate,
        beta=momentum,
        weight_decay=decay,
        consistent_rms=0.2,
        others=adamw(rate, decay, momentum, stacked),
        matrix_mask=LAYERS,
        stacked=stacked,
    )


def muonh(
    rate: optax.Schedule,
    _: optax.Schedule,
    momentum: Any,
    stacked: lb.Stacked | None,
    **varied: Any,
) -> optax.GradientTransformation:
    """MuonH for the matrices of the layers, Adam for the rest; or with other arguments."""
    return lb.muonh(
        rate,
        beta=momentum,
        b1=momentum,
        b2=B2,
        stacked=stacked,
        **{"matrix_mask": LAYERS, **varied},
    )


ARMS = {
    "adamw": Arm(0.03, adamw),
    "lamb": Arm(
        0.03,
        lambda rate, decay, momentum, stacked: lb.lamb(
            rate, momentum, B2, weight_decay=decay, stacked=stacked, **LAYERWISE
        ),
    ),
    "lans": Arm(
        0.03,
        lambda rate, decay, momentum, stacked: lb.lans(
            rate, b1=momentum, b2=B2, weight_decay=decay, stacked=stacked, **LAYERWISE
        ),
    ),
    "muon": Arm(0.05, muon),
    "muonh": Arm(0.2, muonh, decays=False),
}
