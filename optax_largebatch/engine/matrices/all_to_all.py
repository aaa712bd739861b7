"""The exchange of matrices between devices that have shards of them.

Nothing is gathered. Matrices of one shape, of all leaves and of all layers of stacks, are exchanged
in one all-to-all: each device sends its shards of all of them and receives all shards of some. It
works on these, and a second all-to-all brings the shards back. Devices that are known to have
copies of the same shards divide the work, and then share the results. If there are fewer matrices
than devices, a group of devices gets each matrix in pieces, if that is cheaper (`groups.py`).
Devices that are left idle work on narrower matrices, filled up with zeros, or on zeros.
"""

from collections.abc import Sequence
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_largebatch import norms
from optax_largebatch.engine.matrices.layouts import Exchange, MatrixRange, choose_plan, layout_of
from optax_largebatch.engine.matrices.side_by_side import map_matrices, tasks_by
from optax_largebatch.engine.requests import Tasks
from optax_largebatch.params.shapes import Axes


class AllToAll:
    """The exchange of the matrices of several arrays: to the devices that work on them, and back.

    Group `i % groups` works on matrix `i`; devices with copies count as groups of their own. So the
    matrices of a device have few layouts.

    Args:
        exchange: what the matrices have in common.
        tasks: the arrays, and the function of their matrices.
    """

    def __init__(self, exchange: Exchange, tasks: Tasks):
        # Equal layouts follow each other, so that few devices have matrices of two.
        self._by_layout = sorted(tasks_by(layout_of, tasks).items())
        self._plan = choose_plan(exchange, tasks)
        group = self._plan.group
        columns = self._plan.columns

        def group_last(names: tuple[str, ...]) -> tuple[str, ...]:
            # The devices of a group follow each other: its axis changes fastest.
            return tuple(sorted(names, key=lambda name: name == group.axis))

        self._exchange = exchange._replace(
            shape=(exchange.shape[0], columns),
            across=group_last(exchange.across),
            copies=group_last(exchange.copies),
        )
        copies = norms.devices_along(exchange.copies)
        devices = norms.devices_along(exchange.across)
        self._devices = copies, devices
        """How many devices have copies of the same shards, and how many share a matrix."""
        if group.axis in exchange.copies:
            copies //= group.size
            self._order: Axes = (2, 0, 3, 1, 4)
        else:
            devices //= group.size
            self._order = (2, 3, 0, 1, 4)
        """Takes (pieces, matrices, copies, devices, elements) to the order of the devices."""
        self._groups = self._plan.matrices_per_group, copies, devices
        """The matrices of a group, and the number of groups along copies and across."""
        self._pieces: dict[Any, jax.Array] = {}
        self._ranges: list[MatrixRange] = []
        stop = 0
        for layout, alike in self._by_layout:
            start = stop
            for key, task in alike.items():
                shards = task.to_batch()  # say, (layers=12, rows=768, columns=384)
                self._pieces[key] = layout.to_pieces(shards, group.size, columns)
                stop += len(shards)
            self._ranges.append(MatrixRange(layout.of_piece(columns), start, stop))
        # What the function is given after its matrix is the same for all leaves.
        function = next(iter(tasks.values())).apply
        self._function = functools.partial(function, group=group) if group.axis else function

    def received(self) -> jax.Array:
        """All pieces of this device's matrices: (devices, matrices, elements of a piece).

        The shards of 12 layers, (layers=12, rows=768, columns=3072) on 8 devices, are padded to 16
        layers; 2 layers of 8 shards come back.
        """
        pieces = jnp.concatenate(list(self._pieces.values()), axis=1)  # (1, 12, 768 * 384)
        size, _, elements = pieces.shape
        per_group, copies, devices = self._groups
        padding = [(0, 0), (0, self._plan.padding), (0, 0)]
        padded = jnp.pad(pieces, padding)  # (1, 16, 768 * 384)
        # (pieces=1, matrices=2, copies=1, devices=8, 768 * 384)
        of_groups = padded.reshape(size, per_group, copies, devices, elements)
        # (copies=1, devices=8, matrices=2, 768 * 384)
        of_copies = of_groups.transpose(self._order)
        of_copies = of_copies.reshape(*self._devices, per_group, elements)
        return self._exchanged(norms.local_shard(of_copies, 0, self._exchange.copies)[0])

    def results(self, received: jax.Array) -> dict[Any, jax.Array]:
        """The results for the arrays, from the pieces of this device's matrices."""
        exchange = self._exchange
        layouts = [x.layout for x in self._ranges]
        # (devices=8, matrices=2, 768 * 384) to (matrices=2, rows=768, columns=3072), and back
        by_layout = [layout.unshard(received, exchange) for layout in layouts]
        matrices = self._in_its_layout(by_layout, axis=0)
        # Whole matrices count, not products: what was received is in memory, too.
        matrices = map_matrices(self._function, matrices, math.prod(exchange.shape))
        by_layout = [layout.shard(matrices, exchange) for layout in layouts]
        pieces = self._in_its_layout(by_layout, axis=1)
        of_copies = norms.gathered(self._exchanged(pieces)[None], 0, exchange.copies)
        # (copies=1, devices=8, pieces=1, matrices=2, 768 * 384), in the order of `received`
        size = self._plan.group.size
        elements = pieces.shape[-1]
        lengths = (size, *self._groups, elements)
        of_groups = of_copies.reshape(norms.lengths_along(lengths, self._order))
        # (pieces=1, matrices=16, 768 * 384), of which the first 12 are no padding
        done = of_groups.transpose(np.argsort(self._order).tolist())
        done = done.reshape(size, math.prod(self._groups), elements)
        results = {}
        start = 0
        for layout, alike in self._by_layout:
            for key, task in alike.items():
                stop = start + self._pieces[key].shape[1]
                shards = layout.from_pieces(done[:, start:stop], self._plan.columns)
                results[key] = task.from_batch(shards)
                start = stop
        return results

    def _exchanged(self, shards: jax.Array) -> jax.Array:
        """What the other devices send, each in exchange for the shard sent to it."""
        across = self._exchange.across
        return jax.lax.all_to_all(shards, across, 0, 0) if across else shards

    def _in_its_layout(
        self,
        by_layout: Sequence[jax.Array],
        axis: int,
    ) -> jax.Array:
        """For each matrix of this device the entry of its layout."""
        exchange = self._exchange
        per_group, copies, devices = self._groups
        copy = jax.lax.axis_index(exchange.copies) * copies // self._devices[0]
        group = jax.lax.axis_index(exchange.across) * devices // self._devices[1]
        numbers = jnp.arange(per_group, dtype=jnp.int32)
        here = (numbers * copies + copy) * devices + group
        result = by_layout[0]
        for matrices, candidate in zip(self._ranges[1:], by_layout[1:], strict=True):
            has_layout = (here >= matrices.start) & (here < matrices.stop)
            shape = [per_group if k == axis else 1 for k in range(result.ndim)]
            result = jnp.where(has_layout.reshape(shape), candidate, result)
        return result
