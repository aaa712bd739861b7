"""The optimizers under the common suite; a new one joins by a line here."""

from collections.abc import Callable
from typing import Any, NamedTuple

import optax

import optax_largebatch as lb


class Entry(NamedTuple):
    """An optimizer with settings that use what it has."""

    factory: Callable[..., optax.GradientTransformationExtraArgs]
    kwargs: dict[str, Any]
    peak: float
    """A learning rate from which it converges on the toy problems, decayed linearly to 0."""
    static_args: tuple[str, ...] = ()
    """Arguments that `optax.inject_hyperparams` must not inject."""

    def make(self, **changes: Any) -> optax.GradientTransformationExtraArgs:
        """The optimizer, with some settings changed."""
        return self.factory(**(self.kwargs | changes))


OPTIMIZERS = {
    "lamb": Entry(lb.lamb, {"learning_rate": 1e-2, "weight_decay": 1e-3}, peak=0.1),
    "lans": Entry(lb.lans, {"learning_rate": 1e-2, "weight_decay": 1e-3}, peak=0.1),
    "lars": Entry(
        lb.lars,
        {"learning_rate": 1e-1, "weight_decay": 1e-3, "trust_coefficient": 0.01},
        peak=1.0,
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
}
