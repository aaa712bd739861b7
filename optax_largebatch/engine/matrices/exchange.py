"""The exchange of matrices between devices that have parts of them.

Nothing is gathered. Matrices of one shape, of all leaves and of all layers of stacks, are shared
out: each device gives away its parts of all of them and gets all parts of some, in one all-to-all.
Each device works on its matrices, and the parts travel back in a second all-to-all. Devices that
are known to have copies of the same parts share the work, and tell each other the results. If there
are fewer matrices than devices, some devices work on zeros; or a group of devices gets each matrix
in pieces, if that is cheaper (`groups.py`).
"""

from collections.abc import Callable, Mapping, Sequence
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_largebatch import norms
from optax_largebatch.engine.matrices.cuts import Cut, Exchange, Share, cut_of, shared
from optax_largebatch.engine.requests import OnMatrices

AT_A_TIME = 2**22
"""The number of elements from which products of matrices fill a device."""


class Work(NamedTuple):
    """An array, and the work on its matrices."""

    array: jax.Array
    numbers: Sequence[jax.Array]
    """What the function is given after its matrix."""
    on: OnMatrices

    def function(self, matrix: jax.Array, **own: Any) -> jax.Array:
        """The result for a matrix."""
        return self.on.function(matrix, *self.numbers, **own)


class Trip:
    """The matrices of several arrays on their way: to the devices that work on them, and back.

    Matrix `i` is worked on by group `i % groups`, those with copies counted, so that a device works
    on few that are cut otherwise than those of its neighbours.

    Args:
        exchange: what the matrices have in common.
        asked: the arrays, and the work on them.
    """

    def __init__(self, exchange: Exchange, asked: Mapping[Any, Work]):
        cuts = {key: cut_of(x, on.matrices) for key, (x, _, on) in asked.items()}
        # Alike cuts follow each other, so that few devices have to look at matrices in two ways.
        self._asked = {key: asked[key] for key in sorted(asked, key=lambda key: cuts[key])}
        apart = {key: on.matrices.apart(x) for key, (x, _, on) in self._asked.items()}
        self._begins: dict[Any, int] = {}
        shares: dict[Cut, Share] = {}
        number = 0
        for key, x in apart.items():
            self._begins[key] = number
            first = shares[cuts[key]].first if cuts[key] in shares else number
            number += len(x)
            shares[cuts[key]] = Share(cuts[key], first, number)
        self._shared = shared(exchange, {cut: x.last - x.first for cut, x in shares.items()})
        group, columns = self._shared.group, self._shared.columns
        # The devices of a group follow each other: its axis changes fastest.
        across, copies = (
            tuple(sorted(names, key=group.axis.__eq__))
            for names in (exchange.across, exchange.copies)
        )
        whole = (exchange.shape[0], columns)
        self._exchange = exchange._replace(shape=whole, across=across, copies=copies)
        self._shares = [x._replace(cut=x.cut.piece(columns)) for x in shares.values()]
        self._cuts = cuts
        self._pieces = {
            key: cuts[key].pieces(x.reshape(len(x), -1), group.size, columns)
            for key, x in apart.items()
        }
        # With its numbers, which are the same for all leaves.
        function = next(iter(asked.values())).function
        self._function = functools.partial(function, group=group) if group.axis else function

    def arrived(self) -> jax.Array:
        """All pieces of the matrices of this device: (devices, matrices, elements of a piece)."""
        pieces = jnp.concatenate(list(self._pieces.values()), axis=1)
        size, _, elements = pieces.shape
        turns, copies, devices = self._of_groups
        padded = jnp.pad(pieces, ((0, 0), (0, self._shared.missing), (0, 0)))
        of_groups = padded.reshape(size, turns, copies, devices, elements)
        of_copies = of_groups.transpose(self._order).reshape(*self._devices, turns, elements)
        if not self._exchange.copies:
            return self._sent(of_copies[0])
        return self._sent(jax.lax.dynamic_index_in_dim(of_copies, self._copy, keepdims=False))

    def results(self, arrived: jax.Array) -> dict[Any, jax.Array]:
        """The results for the arrays, from the pieces of this device's matrices."""
        exchange = self._exchange
        matrices = self._one_of_ways([x.cut.joined(arrived, exchange) for x in self._shares], 0)
        matrices = each(self._function, matrices)
        pieces = self._one_of_ways([x.cut.apart(matrices, exchange) for x in self._shares], 1)
        own = self._sent(pieces)[None]
        of_copies = norms.gathered(own, 0, exchange.copies) if exchange.copies else own
        turns, *groups = self._of_groups
        lengths = (self._shared.group.size, turns, *groups, pieces.shape[-1])
        of_groups = of_copies.reshape([lengths[axis] for axis in self._order])
        done = of_groups.transpose(np.argsort(self._order).tolist())
        done = done.reshape(lengths[0], math.prod(lengths[1:4]), lengths[-1])
        results = {}
        for key, (x, _, on) in self._asked.items():
            begin, number = self._begins[key], self._pieces[key].shape[1]
            own = done[:, begin : begin + number]
            parts = self._cuts[key].parts(own, self._shared.columns)
            results[key] = on.matrices.back(parts, x.shape)
        return results

    @property
    def _devices(self) -> tuple[int, int]:
        """How many devices have copies of the same parts, and how many have parts of a matrix."""
        exchange = self._exchange
        return norms.devices_along(exchange.copies), norms.devices_along(exchange.across)

    @property
    def _of_groups(self) -> tuple[int, int, int]:
        """The turns of a group, and the groups along copies and across."""
        copies, devices = self._devices
        group = self._shared.group
        if group.axis in self._exchange.copies:
            return self._shared.turns, copies // group.size, devices
        return self._shared.turns, copies, devices // group.size

    @property
    def _order(self) -> tuple[int, ...]:
        """(pieces, turns, copies, devices, elements) in the order of devices and their copies."""
        return (
            (2, 0, 3, 1, 4) if self._shared.group.axis in self._exchange.copies else (2, 3, 0, 1, 4)
        )

    @property
    def _copy(self) -> Any:
        """The number of this device among those that have copies."""
        return jax.lax.axis_index(self._exchange.copies) if self._exchange.copies else 0

    def _sent(self, parts: jax.Array) -> jax.Array:
        """The parts that the other devices send, each in exchange for the one sent to it."""
        across = self._exchange.across
        return jax.lax.all_to_all(parts, across, 0, 0) if across else parts

    def _one_of_ways(self, ways: Sequence[jax.Array], axis: int) -> jax.Array:
        """For each matrix of this device the way in which it is cut."""
        across = self._exchange.across
        turns, copies, devices = self._of_groups
        place = jax.lax.axis_index(across) if across else 0
        copy, place = self._copy * copies // self._devices[0], place * devices // self._devices[1]
        mine = (jnp.arange(turns, dtype=jnp.int32) * copies + copy) * devices + place
        result = ways[0]
        for share, way in zip(self._shares[1:], ways[1:], strict=True):
            is_own = (mine >= share.first) & (mine < share.last)
            shape = [turns if k == axis else 1 for k in range(result.ndim)]
            result = jnp.where(is_own.reshape(shape), way, result)
        return result


def each(function: Callable[[jax.Array], jax.Array], matrices: jax.Array) -> jax.Array:
    """A function of each matrix, on as many at a time as fill a device.

    Each result is written over its matrix, so that little memory is taken besides.
    """
    number, height, width = matrices.shape
    together = max(AT_A_TIME // max(height * width, 1), 1)
    of_several = jax.vmap(function)
    if number <= together:
        return function(matrices[0])[None] if number == 1 else of_several(matrices)
    whole = number // together

    def step(turn: Any, matrices: jax.Array) -> jax.Array:
        own = jax.lax.dynamic_slice_in_dim(matrices, turn * together, together)
        return jax.lax.dynamic_update_slice_in_dim(matrices, of_several(own), turn * together, 0)

    matrices = jax.lax.fori_loop(0, whole, step, matrices)
    rest = matrices[whole * together :]
    return matrices.at[whole * together :].set(of_several(rest)) if len(rest) else matrices
