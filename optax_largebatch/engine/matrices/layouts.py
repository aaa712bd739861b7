"""How matrices are split into the shards that devices have, and put together again."""

from collections.abc import Callable, Iterable
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_largebatch import norms
from optax_largebatch.engine.matrices.groups import SharingPlan, sharing_plans
from optax_largebatch.engine.requests import EachMatrix, MatrixFunction, Tasks
from optax_largebatch.params.fused import Fused
from optax_largebatch.params.shapes import Shape


class Exchange(NamedTuple):
    """What matrices that are exchanged together have in common."""

    function: Callable[..., jax.Array]
    shape: tuple[int, int]
    """The sides of a matrix, the shorter one first."""
    dtype: jnp.dtype
    across: tuple[str, ...]
    """The mesh axes that split each matrix."""
    copies: tuple[str, ...]
    """The mesh axes along which all devices have the same matrices."""
    splits: bool
    """Whether a group of devices may share a matrix."""

    @property
    def moves(self) -> bool:
        """Whether several devices take part."""
        return norms.devices_along((*self.across, *self.copies)) > 1

    def fits_into(self, wide: "Exchange") -> bool:
        """Whether columns of zeros make its matrices those of another exchange."""
        widened = self._replace(shape=(self.shape[0], wide.shape[1]))
        return self.shape < wide.shape and widened == wide and self.splits and self.moves


class ShardLayout(NamedTuple):
    """How a matrix is split into shards."""

    lengths: Shape
    """The lengths of a shard, along the axes of its rows and those of its columns."""
    mesh_axes: tuple[tuple[str, ...], ...]
    """The mesh axes that split each axis."""
    row_axes: int
    """How many of the axes are those of the rows."""
    is_tall: bool
    """Whether there are more rows than columns; in the exchange a matrix lies on its long side."""

    @property
    def column_unit(self) -> int:
        """The columns of a device in a group are a multiple of it."""
        unit = 1
        for axis in self._long_side:
            unit *= norms.devices_along(self.mesh_axes[axis])
            if axis != self._shared_axis:
                unit *= max(self.lengths[axis], 1)
        return unit

    def of_piece(self, columns: int) -> "ShardLayout":
        """The layout of the pieces of a group, in which each device has so many columns."""
        lengths = list(self.lengths)
        lengths[self._shared_axis] = columns // self.column_unit
        return self._replace(lengths=tuple(lengths))

    def to_pieces(
        self,
        shards: jax.Array,
        devices: int,
        columns: int,
    ) -> jax.Array:
        """For each device of a group a piece of each shard: (devices, matrices, elements).

        Each device gets so many columns of the whole matrix. Shards of 96 columns, 8 of a matrix,
        are shared by 2 devices in pieces of 48: (layers=12, rows=768, columns=96), to
        (12, 768, 2, 48), to (2, 12, 768 * 48).
        """
        matrices = len(shards)
        axis = self._shared_axis + 1
        of_piece = self.of_piece(columns).lengths
        length = of_piece[self._shared_axis]
        x = shards.reshape(matrices, *self.lengths)
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, devices * length - x.shape[axis])
        x = jnp.pad(x, widths)
        x = x.reshape(*x.shape[:axis], devices, length, *x.shape[axis + 1 :])
        x = jnp.moveaxis(x, axis, 0)
        return x.reshape(devices, matrices, math.prod(of_piece))

    def from_pieces(self, pieces: jax.Array, columns: int) -> jax.Array:
        """The reverse of `to_pieces`: (matrices, lengths of a shard)."""
        devices, matrices, _ = pieces.shape
        axis = self._shared_axis + 1
        # (2, 12, 768 * 48) to (2, 12, 768, 48), (12, 768, 2, 48), (12, 768, 96)
        x = pieces.reshape(devices, matrices, *self.of_piece(columns).lengths)
        x = jnp.moveaxis(x, 0, axis)
        padded = devices * x.shape[axis + 1]
        x = x.reshape(*x.shape[:axis], padded, *x.shape[axis + 2 :])
        return jax.lax.slice_in_dim(x, 0, self.lengths[self._shared_axis], axis=axis)

    def unshard(self, shards: jax.Array, exchange: Exchange) -> jax.Array:
        """Matrices (matrices, rows, columns) of their shards (devices, matrices, elements).

        8 shards of 2 matrices: (devices=8, layers=2, 768 * 384) to (8, 2, 768, 384), transposed to
        (2, 768, 8, 384), and joined to (layers=2, rows=768, columns=3072).
        """
        devices, order = self._order(exchange)
        matrices = shards.shape[1]
        x = shards.reshape(*devices, matrices, *self.lengths)
        x = jnp.transpose(x, order)
        return x.reshape(matrices, *exchange.shape)

    def shard(self, matrices: jax.Array, exchange: Exchange) -> jax.Array:
        """The reverse of `unshard`."""
        devices, order = self._order(exchange)
        lengths = (*devices, len(matrices), *self.lengths)
        x = matrices.reshape(norms.lengths_along(lengths, order))
        x = jnp.transpose(x, np.argsort(order).tolist())
        return x.reshape(math.prod(devices), len(matrices), math.prod(self.lengths))

    @property
    def _long_side(self) -> range:
        """The axes of the long side."""
        return range(self.row_axes) if self.is_tall else range(self.row_axes, len(self.lengths))

    @property
    def _shared_axis(self) -> int:
        """The axis that the devices of a group share: the longest of the long side."""
        return max(self._long_side, key=lambda axis: self.lengths[axis])

    def _order(self, exchange: Exchange) -> tuple[list[int], list[int]]:
        """The devices along each mesh axis, and the order of axes in a whole matrix."""
        across = exchange.across
        order = [len(across)]
        first = self.row_axes if self.is_tall else 0
        axes = list(enumerate(self.mesh_axes, len(across) + 1))
        for axis, names in axes[first:] + axes[:first]:
            order += [*map(across.index, names), axis]
        return [norms.devices_along((name,)) for name in across], order


class MatrixRange(NamedTuple):
    """Consecutive matrices of an exchange that have the same layout."""

    layout: ShardLayout
    start: int
    stop: int


def layout_of(task: EachMatrix) -> ShardLayout:
    """How the matrices of an array are split."""
    matrices = task.on.matrices
    axes = matrices.sides
    names = [splitting(matrices.sharding.mesh_axes[axis]) for axis in axes]
    height, width = matrices.shape
    lengths = norms.lengths_along(task.array.shape, axes)
    return ShardLayout(lengths, tuple(names), len(matrices.rows), height > width)


def splitting(names: Iterable[str]) -> tuple[str, ...]:
    """The mesh axes, of these, that split arrays here: bound ones of several devices."""
    return tuple([x for x in names if norms.is_bound(x) and norms.devices_along((x,)) > 1])


def choose_plan(exchange: Exchange, tasks: Tasks) -> SharingPlan:
    """The cheapest plan to share the matrices of the arrays of an exchange."""
    number = 0
    unit = 1
    for task in tasks.values():
        layout = layout_of(task)
        number += task.array.size // math.prod(layout.lengths)
        unit = math.lcm(unit, layout.column_unit)
    names = (*exchange.across, *exchange.copies)
    axes = {name: norms.devices_along((name,)) for name in names}
    itemsize = exchange.dtype.itemsize
    plans = sharing_plans(number, exchange.shape, axes, itemsize, unit)
    if not exchange.splits:
        return next(plans)
    return min(plans, key=lambda plan: plan.cost)


def with_the_matrices_inside(
    task: EachMatrix,
    is_automatic: bool,
) -> EachMatrix:
    """The task for the matrices that those of an array are fused of.

    They are opened, so that devices share them, if no shard cuts one of them in pieces. On an
    automatic mesh only the compiler knows the shards.
    """
    on = task.on
    if on.matrices.fused is None:
        return task
    opened = None if is_automatic else on.matrices.opened(task.array.shape)
    if opened is not None:
        matrices, shape = opened
        on = on._replace(matrices=matrices)
        return task._replace(array=task.array.reshape(shape), on=on)
    function = _of_each_inside(on.matrices.fused, on.function)
    closed = on.matrices._replace(fused=None)
    return task._replace(on=MatrixFunction(function, closed, on.dtype, splits=False))


@functools.lru_cache
def _of_each_inside(
    fused: Fused,
    function: Callable[..., jax.Array],
) -> Callable[..., jax.Array]:
    """The function of a fused matrix: one object, since equal functions move together."""
    return functools.partial(fused.map, function)
