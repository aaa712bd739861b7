"""The optimizers under the common suite; a new one joins by a line here."""

from collections.abc import Callable
import inspect
from typing import Any, NamedTuple

import optax
import pytest

import optax_largebatch as lb


class Entry(NamedTuple):
    """An optimizer with settings that use what it has."""

    factory: Callable[..., optax.GradientTransformationExtraArgs]
    kwargs: dict[str, Any]
    peak: float
    """A learning rate from which it converges on the toy problems, decayed linearly to 0."""
    static_args: tuple[str, ...] = ()
    """Arguments that `optax.inject_hyperparams` must not inject."""
    needs_specs: bool = False
    """Whether it needs `partition_specs` inside `jax.shard_map`, where parameters are split."""
    is_partition: bool = False
    """Whether it is several optimizers, each for parameters of its own."""
    keeps_norms: bool = False
    """Whether matrices keep their norms."""

    @property
    def arguments(self):
        """The arguments of the factory."""
        return inspect.signature(self.factory).parameters

    def known(self, **settings):
        """Those of the settings that the optimizer has; not every one has a weight decay."""
        return {name: value for name, value in settings.items() if name in self.arguments}

    def make(self, **changes):
        """The optimizer, with some settings changed."""
        return self.factory(**(self.kwargs | changes))


LONG = ("adamh", "cain", "larc", "learned_gradient", "scaled_adam")
"""What all do is tested by `make test-slow` for them: their states and norms are many, `larc` is
`lars` but for a limit of its ratios, and `adamh` is in `muonh`."""

OPTIMIZERS = {
    "lamb": Entry(lb.lamb, {"learning_rate": 1e-2, "weight_decay": 1e-3}, peak=0.1),
    "lans": Entry(lb.lans, {"learning_rate": 1e-2, "weight_decay": 1e-3}, peak=0.1),
    "lars": Entry(
        lb.lars, {"learning_rate": 1e-1, "weight_decay": 1e-3, "trust_coefficient": 0.01}, peak=1.0
    ),
    "larc": Entry(lb.larc, {"learning_rate": 1e-2, "weight_decay": 1e-3}, peak=0.1),
    "lbsgd": Entry(
        lb.lbsgd,
        {
            "learning_rate": 1e-2,
            "momentum": 0.9,
            "weight_decay": 1e-3,
            "batch_scale": 2,
            "updates_per_epoch": 4,
        },
        peak=0.02,
        static_args=("batch_scale",),
    ),
    "muon": Entry(
        lb.muon,
        {"learning_rate": 1e-2, "weight_decay": 1e-3},
        peak=0.1,
        static_args=("ns_coeffs", "ns_steps"),
        needs_specs=True,
        is_partition=True,
    ),
    "muonh": Entry(
        lb.muonh,
        {"learning_rate": 1e-2},
        peak=0.1,
        static_args=("ns_coeffs", "ns_steps", "radius"),
        needs_specs=True,
        is_partition=True,
        keeps_norms=True,
    ),
    "adamh": Entry(
        lb.adamh,
        {"learning_rate": 1e-2},
        peak=0.1,
        static_args=("radius",),
        is_partition=True,
        keeps_norms=True,
    ),
    "eve": Entry(lb.eve, {"learning_rate": 1e-2, "weight_decay": 1e-3}, peak=0.1),
    "cain": Entry(lb.cain, {"learning_rate": 1e-2}, peak=0.1, needs_specs=True),
    "learned_gradient": Entry(
        lb.learned_gradient,
        {"learning_rate": 1e-2, "lr_est_period": 2},
        peak=0.1,
        static_args=("lr_est_period", "max_fullcov_size"),
        needs_specs=True,
    ),
    "scaled_adam": Entry(lb.scaled_adam, {"learning_rate": 1e-2, "clipping_scale": 2.0}, peak=0.1),
}


def named(names):
    """The names as parameters of a test, the long ones marked as slow."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in names]


WRAPPERS = {
    "accumulate_gradients": lambda inner: lb.accumulate_gradients(inner, every=2),
    "average_weights": lambda inner: lb.average_weights(inner, half_life=2),
    "dynamic_loss_scale": lambda inner: lb.dynamic_loss_scale(inner, initial_scale=1.0),
    "master_weights": lb.master_weights,
    "skip_bad_steps": lb.skip_bad_steps,
    "skip_bad_steps, spikes": lambda inner: lb.skip_bad_steps(inner, deviations=6),
    "stochastic_rounding": lb.stochastic_rounding,
}
