"""The optimizers under the common suite; a new one joins by a line in `registry.json`."""

import inspect
import json
from pathlib import Path
from typing import Any, NamedTuple

import optax_largebatch as lb
from tests.conftest import slow_but


class Entry(NamedTuple):
    """An optimizer with settings that use what it has."""

    factory: Any
    kwargs: dict
    peak: float
    """A learning rate from which it converges on the toy problems, decayed linearly to 0."""
    static_args: list | tuple = ()
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
    name: Entry(getattr(lb, name), **entry)
    for name, entry in json.loads(Path(__file__).with_suffix(".json").read_text()).items()
}


def named(names):
    """The names as parameters of a test, the long ones marked as slow."""
    return slow_but(OPTIMIZERS.keys() - LONG, names)


WRAPPERS = {
    "accumulate_gradients": lambda inner: lb.accumulate_gradients(inner, every=2),
    "average_weights": lambda inner: lb.average_weights(inner, half_life=2),
    "dynamic_loss_scale": lambda inner: lb.dynamic_loss_scale(inner, initial_scale=1.0),
    "master_weights": lb.master_weights,
    "skip_bad_steps": lb.skip_bad_steps,
    "skip_bad_steps, spikes": lambda inner: lb.skip_bad_steps(inner, deviations=6),
    "stochastic_rounding": lb.stochastic_rounding,
}
