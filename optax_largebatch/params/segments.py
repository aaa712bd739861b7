"""Segments: the pieces of an axis of a parameter that a text cuts, each of which is a block."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from optax_largebatch import norms
from optax_largebatch.params.fused import check_text, read_fused, stacks_in
from optax_largebatch.params.leaves import LeafSharding, Leaves
from optax_largebatch.params.shapes import Axes, Shape


class Segments(NamedTuple):
    """The segments of an axis of a parameter, each of which is a block."""

    axis: int
    axes: Axes
    """This axis and those of the stack, which run over blocks."""
    ids: tuple[int, ...]
    """For each index along it the number of its segment."""
    sharding: LeafSharding
    """How the parameter is split between devices."""

    @property
    def number(self) -> int:
        """How many segments there are."""
        return max(self.ids) + 1

    @property
    def lengths(self) -> np.ndarray:
        """How many indices each segment has."""
        return np.bincount(self.ids)

    def along_axis(self, values: Any) -> Any:
        """A vector of values of the segments, in an array that broadcasts."""
        ndim = len(self.sharding.shape)
        return values.reshape([self.number if axis == self.axis else 1 for axis in range(ndim)])

    def sums_of_each(self, sums: jax.Array) -> jax.Array:
        """Sums for each index along the axis, of this device, added up for each segment.

        The sum over devices has those of the whole parameter.
        """
        mesh_axes = self.sharding.mesh_axes[self.axis]
        ids = norms.local_shard(jnp.array(self.ids), 0, mesh_axes)
        whole = norms.with_spec(sums, PartitionSpec())
        first = jnp.moveaxis(whole, self.axis, 0)
        of_segments = jax.ops.segment_sum(first, ids, self.number)
        of_segments = jnp.moveaxis(of_segments, 0, self.axis)
        stack = [axis for axis in self.axes if axis != self.axis]
        return self.sharding.placed(of_segments, stack)

    def answer(self, asked: Any, total: jax.Array) -> jax.Array:
        """The answer to a `Statistic` of blocks, from the sum for each.

        It has an entry for each index along the axis, the same for all of a segment.
        """
        if asked.kept is not None:
            return total
        if asked.kind in ("mean", "rms"):
            total /= self.along_axis(self.lengths).astype(total.dtype)
            shape = self.sharding.shape
            total /= math.prod(norms.lengths_along(shape, norms.other_axes(len(shape), self.axes)))
        total = self.of_device(total)
        return norms.from_sum_of_squares(total) if asked.is_root else total

    def of_device(self, values: jax.Array) -> jax.Array:
        """Values of the segments, for each index along the axis that this device has."""
        return self.sharding.local_shard(self.spread(values))

    def spread(self, values: jax.Array) -> jax.Array:
        """Values of the segments, given to each index along the axis."""
        return jnp.take(values, np.array(self.ids), self.axis)

    def first(self, values: jax.Array) -> jax.Array:
        """The reverse of `spread`."""
        _, places = np.unique(self.ids, return_index=True)
        return jnp.take(values, places, self.axis)


class BlockAxes(NamedTuple):
    """The axes of a leaf that run over its blocks."""

    axes: Axes
    segments: Segments | None = None
    """The segments of one of them, if a text cuts it."""

    def shape(self, whole: Shape) -> Shape:
        """The shape of an array with a number for each block, by that of the whole leaf."""
        lengths = norms.shape_of_blocks(whole, self.axes)
        if self.segments is None:
            return lengths
        axis = self.segments.axis
        return (*lengths[:axis], self.segments.number, *lengths[axis + 1 :])

    def lengths(self, whole: Shape) -> Shape:
        """The lengths of the axes that run over blocks, by the shape of the whole leaf."""
        return norms.lengths_along(self.shape(whole), self.axes)

    def whole_shape(self, index: int, leaves: Leaves) -> Shape:
        """The same for a leaf, on all devices together."""
        whole = leaves.sharding(index, "blocks have numbers").shape if self.axes else ()
        return self.shape(whole)

    def vector(
        self,
        values: jax.Array,
        index: int,
        leaves: Leaves,
    ) -> jax.Array:
        """A vector with one entry for each block of a leaf, the same on all devices."""
        if not self.axes:
            return jax.lax.reshape(values, (1,))
        shape = norms.shape_of_blocks(leaves.arrays[index].shape, self.axes)
        gathered = jnp.broadcast_to(values, shape)
        for axis in self.axes:
            gathered = norms.gathered(gathered, axis, leaves.axes_along(index, axis))
        if self.segments is not None:
            gathered = self.segments.first(gathered)
        return jnp.ravel(gathered)


def axes_by_text(
    argument: str,
    text: str,
    stack: Axes,
    leaves: Leaves,
    index: int,
) -> BlockAxes:
    """The axes over the blocks of a leaf by its text, with the segments if that cuts an axis."""
    name = leaves.names[index]
    check_text(argument, text, name, stack)
    sharding = leaves.sharding(index, "a norm of each part of an axis needs all of the axis")
    sides = read_fused(argument, name, sharding.shape, text)
    stack = stacks_in(text)
    if sides.fused is None or not sides.fused.cut_axes:
        return BlockAxes(stack)
    cut, *others = sides.fused.cut_axes
    if others:
        raise ValueError(
            f"{argument}: {text!r} must cut one axis of {name!r}, and cuts two: a norm is of a "
            "part of one axis. Name the other one without cutting it, or keep the matrices in "
            "several parameters."
        )
    axis = (*sides.rows, *sides.columns)[cut]
    axes = tuple(sorted({*stack, axis}))
    ids = sides.fused.ids_along([cut])
    return BlockAxes(axes, Segments(axis, axes, tuple(ids.tolist()), sharding))
