"""What the nodes of a state keep of each parameter, whichever library and checkpoint it is from."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_largebatch.migration.conversion import Conversion
from optax_largebatch.params.owners import StateNode, keyed_arrays, nodes_of, numbers_of
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
    """What a node of a state keeps of one parameter."""

    what: str
    """`ADAM`, `MUON` or `BUFFER`."""
    node: StateNode
    arrays: dict[str, Any]
    """The fields of the node that hold moments, the first moment first."""

    @property
    def first(self) -> Any:
        """The first moment, whatever its field is called."""
        return next(iter(self.arrays.values()))


class Kept:
    """The nodes of a state, and the moments of each parameter in them.

    An optimizer of several nodes, such as `muon`, shows each parameter to one node, and hides it
    from the others.
    """

    conversion: Conversion | None = None
    """How the parameters have become others since."""
    forgotten: frozenset[int] = frozenset()
    """The numbers of the parameters that begin anew."""

    def __init__(self, whose: str, params: Any, state: Any):
        """Looks each parameter up.

        Args:
            whose: the argument that the state is of, for messages.
            params: the parameters.
            state: the state.
        """
        self.params = params
        self.state = state
        self.before = self
        """The same of the old parameters."""
        self.names = leaf_names(params)
        self.numbers = numbers_of(params)
        self.shapes = list(map(jnp.shape, jax.tree.leaves(params)))
        self.nodes = _states(state)
        self.moments: list[Moment | None] = [None] * len(self.names)
        """The moments of each parameter, None where no node has any."""
        for node in self.nodes:
            if what := kind_of(node):
                for field in _MOMENTS:
                    self._add(whose, what, node, field)

    def _add(self, whose: str, what: str, node: StateNode, field: str) -> None:
        """Adds the moments in a field of a node."""
        for keys, array in keyed_arrays(node.fields.get(field)):
            if keys not in self.numbers:
                raise ValueError(
                    f"the {field} of {whose} must have the tree structure of params: it has an "
                    f"array for {'/'.join(keys)!r}, and params have {', '.join(self.names)}."
                )
            number = self.numbers[keys]
            moment = self.moments[number] or Moment(what, node, {})
            if moment.node.keys != node.keys:
                raise ValueError(
                    f"{whose} must hold the moments of {self.names[number]!r} once, and two of its "
                    "parts have them. optimizer.init(params) begins without the gradients so far."
                )
            self.moments[number] = moment._replace(arrays={**moment.arrays, field: array})

    def has(self, kind: type) -> bool:
        """Whether the state has a node of this kind."""
        return any(node.is_one(kind) for node in self.nodes)

    def numbered(self, tree: Any) -> dict[int, Any]:
        """The arrays of a tree like the parameters, by the numbers of these."""
        return {self.numbers[keys]: x for keys, x in keyed_arrays(tree) if keys in self.numbers}

    def like_params(self, tree: Any) -> dict[int, Any]:
        """The same without integers, and without arrays of other shapes than the parameters."""
        return {
            k: x
            for k, x in self.numbered(tree).items()
            if jnp.issubdtype(jnp.result_type(x), jnp.inexact) and jnp.shape(x) == self.shapes[k]
        }

    def forget(self, are_forgotten: list[bool]) -> None:
        """Begins some parameters anew."""
        self.forgotten = frozenset(number for number, flag in enumerate(are_forgotten) if flag)
        for number in self.forgotten:
            self.moments[number] = None

    def converted(self, conversion: Conversion) -> "Kept":
        """The same of the parameters that a function makes of these."""
        new = Kept("state", conversion.params, ())
        new.nodes = self.nodes
        new.before = self
        new.conversion = conversion
        moments = {k: moment.arrays for k, moment in enumerate(self.moments) if moment}
        carried = {
            field: conversion.carried({k: x[field] for k, x in moments.items() if field in x})
            for field in _MOMENTS
        }
        for number, sources in enumerate(conversion.sources):
            old: list[Any] = [self.moments[source] for source in sources]
            if old and all(old) and len({x.node.keys for x in old}) == 1:
                arrays = {field: carried[field][number] for field in old[0].arrays}
                new.moments[number] = old[0]._replace(arrays=arrays)
        return new

    def carried(
        self, values: dict[int, Any], begin: dict[int, Any] | None = None
    ) -> dict[int, Any]:
        """Arrays like the old parameters, as they are now, without those that begin anew.

        Args:
            values: the array of each old parameter that has one, by its number.
            begin: what stands in elements that are new, by the number of the new parameter.
        """
        if self.conversion:
            values = self.conversion.carried(values, begin)
        return {number: x for number, x in values.items() if number not in self.forgotten}


def kind_of(node: StateNode) -> str | None:
    """What a node keeps of its parameters: `ADAM`, `MUON`, `BUFFER`, or None."""
    return next((what for what, kinds in _KINDS.items() if node.is_one(*kinds)), None)


def counters(node: StateNode, names: tuple[str, ...]) -> dict[str, Any]:
    """The integers in a node's fields of these names."""
    leaves = {name: jax.tree.leaves(node.fields.get(name)) for name in names}
    return {
        name: arrays[0]
        for name, arrays in leaves.items()
        if [jnp.issubdtype(jnp.result_type(x), jnp.integer) for x in arrays] == [True]
    }


def _states(state: Any) -> list[StateNode]:
    """The nodes of a state that are not inside a copy of the parameters."""
    states: list[StateNode] = []
    copies = set()
    for node in nodes_of(state):
        if any(node.keys[:end] in copies for end in range(len(node.keys) + 1)):
            continue
        states.append(node)
        if issubclass(node.kind, tuple) or kind_of(node):
            copies |= {(*node.keys, name) for name in COPIES}
    return states
