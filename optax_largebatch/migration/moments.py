"""What the parts of a state keep of each parameter, whichever library and checkpoint it is from."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_largebatch.params.owners import Keys, Part, keyed_arrays, numbers_of, parts_of
from optax_largebatch.params.paths import leaf_names
from optax_largebatch.transforms.adam import ScaleByAdamState
from optax_largebatch.transforms.momentum import AccumulateMomentumState
from optax_largebatch.transforms.orthogonalization.orthogonalized_momentum import (
    OrthogonalizeMomentumState,
)


class _LevantersMuonState(NamedTuple):
    """The fields of `ScaleByMuonState` and `ScaleByMuonHState` of Levanter."""

    momentum_buffer: optax.Updates


ADAM = "moments of Adam"
MUON = "a momentum of Muon"
BUFFER = "a momentum buffer"
_KINDS = {
    ADAM: (ScaleByAdamState, optax.ScaleByAdamState),
    MUON: (OrthogonalizeMomentumState, optax.contrib.MuonState, _LevantersMuonState),
    BUFFER: (AccumulateMomentumState, optax.TraceState),
}
_MOMENTS = ("mu", "momentum_buffer", "trace", "nu")

STEPS = ("count", "macro_step", "gradient_step")
"""Fields that count steps."""
MICRO_STEPS = ("micro_step", "mini_step")
"""Fields that count the micro-batches of the next step."""
COPIES = (*_MOMENTS, "accumulator", "acc_grads", "average", "master", "radii")
"""Fields that hold a tree like the parameters, in which nothing is a state, whatever its name."""


class Moment(NamedTuple):
    """What a part of a state keeps of one parameter."""

    what: str
    """`ADAM`, `MUON` or `BUFFER`."""
    part: Part
    arrays: dict[str, Any]
    """The fields of the part that hold moments, the first moment first."""

    @property
    def first(self) -> Any:
        """The first moment, whatever its field is called."""
        return next(iter(self.arrays.values()))


class Kept:
    """The parts of a state, and the moments of each parameter in them.

    An optimizer of several parts, such as `muon`, shows each parameter to one part, and hides it
    from the others.
    """

    def __init__(self, whose: str, params: Any, state: Any):
        """Looks each parameter up.

        Args:
            whose: the argument that the state is of, for messages.
            params: the parameters.
            state: the state.
        """
        self.params, self.state = params, state
        self.names = leaf_names(params)
        self.numbers = numbers_of(params)
        self.parts = _states(state)
        self.moments: list[Moment | None] = [None] * len(self.names)
        """The moments of each parameter, None where no part has any."""
        for part in self.parts:
            what = kind_of(part)
            for name in _MOMENTS if what else ():
                for keys, array in keyed_arrays(part.fields.get(name)):
                    self._add(whose, Moment(what or "", part, {name: array}), keys)

    def _add(self, whose: str, new: Moment, keys: Keys) -> None:
        """Adds a moment of the parameter at these keys."""
        (field,) = new.arrays
        if keys not in self.numbers:
            raise ValueError(
                f"the {field} of {whose} must have the tree structure of params: it has an array "
                f"for {'/'.join(keys)!r}, and params have {', '.join(self.names)}."
            )
        number = self.numbers[keys]
        moment = self.moments[number] or new
        if moment.part.keys != new.part.keys:
            raise ValueError(
                f"{whose} must hold the moments of {self.names[number]!r} once, and two of its "
                "parts have them. optimizer.init(params) begins without the gradients so far."
            )
        self.moments[number] = moment._replace(arrays=moment.arrays | new.arrays)


def kind_of(part: Part) -> str | None:
    """What a part keeps of its parameters: `ADAM`, `MUON`, `BUFFER`, or None."""
    return next((what for what, kinds in _KINDS.items() if part.is_one(*kinds)), None)


def counters(part: Part, names: tuple[str, ...]) -> dict[str, Any]:
    """The integers in a part's fields of these names."""
    found = {name: jax.tree.leaves(part.fields[name]) for name in names if name in part.fields}
    return {
        name: arrays[0]
        for name, arrays in found.items()
        if len(arrays) == 1 and jnp.issubdtype(jnp.result_type(arrays[0]), jnp.integer)
    }


def _states(state: Any) -> list[Part]:
    """The parts of a state that are not inside a copy of the parameters."""
    found: list[Part] = []
    copies = set()
    for part in parts_of(state):
        if any(part.keys[:end] in copies for end in range(len(part.keys) + 1)):
            continue
        found.append(part)
        if issubclass(part.kind, tuple) or kind_of(part):
            copies |= {(*part.keys, name) for name in COPIES}
    return found
