"""The optimizers: how each is built, and where its learning rates are centred.

All have a momentum of 0.9 and, where they have one, a second moment with a decay rate of 0.98. All
get the same warm-up and the same rule: biases and scales are neither decayed nor adapted.
`scaled_adam`, `cain` and `learned_gradient` have no weight decay and nothing to exclude; the floor
under the size of a parameter, which moves biases that start at 0, is 0.01, because the runs are
short (see `docs/icefall.md`).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

import optax_largebatch as lb

KERNELS = lb.excluding("bias|scale")
MOMENTUM, B2, FLOOR = 0.9, 0.98, 0.01
LAYERWISE = {"weight_decay_mask": KERNELS, "trust_ratio_mask": KERNELS}

Build = Callable[[optax.Schedule, jax.Array], optax.GradientTransformation]


class Optimizer(NamedTuple):
    """An optimizer, to be tuned."""

    centre: float
    """The middle of the range of learning rates, the same for both networks and all batch sizes."""
    build: Build
    """From a schedule of the learning rate and a weight decay."""
    decays: bool = True
    """Whether it has a weight decay."""


def sgd(rate: optax.Schedule, decay: jax.Array) -> optax.GradientTransformation:
    """SGD with Nesterov's momentum."""
    return optax.chain(
        optax.add_decayed_weights(decay, mask=KERNELS.mask),
        optax.sgd(rate, momentum=MOMENTUM, nesterov=True),
    )


# `lars` moves what it does not adapt at the learning rate itself. With the paper's coefficient,
# 0.001, one large enough for the kernels is far too large for the biases. `lbsgd` is that of the
# strategy "lars": with the others it is SGD with another warm-up.
OPTIMIZERS = {
    "sgd": Optimizer(0.1, sgd),
    "adamw": Optimizer(
        0.01,
        lambda rate, decay: optax.adamw(rate, MOMENTUM, B2, 1e-8, 0.0, None, decay, KERNELS.mask),
    ),
    "lamb": Optimizer(
        0.02, lambda rate, decay: lb.lamb(rate, MOMENTUM, B2, weight_decay=decay, **LAYERWISE)
    ),
    "lans": Optimizer(
        0.02, lambda rate, decay: lb.lans(rate, MOMENTUM, B2, weight_decay=decay, **LAYERWISE)
    ),
    "lars": Optimizer(
        0.1,
        lambda rate, decay: lb.lars(
            rate, decay, trust_coefficient=0.1, momentum=MOMENTUM, nesterov=True, **LAYERWISE
        ),
    ),
    "lbsgd": Optimizer(
        0.01,
        lambda rate, decay: lb.lbsgd(rate, MOMENTUM, decay, warmup_strategy="lars", **LAYERWISE),
    ),
    "scaled_adam": Optimizer(
        0.05,
        lambda rate, _: lb.scaled_adam(rate, MOMENTUM, B2, param_min_rms=FLOOR, clipping_scale=2.0),
        decays=False,
    ),
    "eve": Optimizer(0.01, lambda rate, decay: lb.eve(rate, MOMENTUM, B2, 1e-8, decay, KERNELS)),
    "cain": Optimizer(
        0.1, lambda rate, _: lb.cain(rate, MOMENTUM, B2, rms_eps=FLOOR), decays=False
    ),
    "learned_gradient": Optimizer(
        0.1,
        lambda rate, _: lb.learned_gradient(rate, MOMENTUM, B2, param_min_rms=FLOOR),
        decays=False,
    ),
}


def warmed_up(rate: jax.Array, warmup_steps: int) -> optax.Schedule:
    """A learning rate that grows in a straight line to `rate` and stays there.

    It does not decay: a decay would need to know beforehand how many steps the target takes.
    """
    return lambda step: rate * jnp.minimum((step + 1) / warmup_steps, 1)
