"""Fields of a state with one number for each block."""

from collections.abc import Sequence
import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import optax

from optax_largebatch import norms
from optax_largebatch.engine.state import Concat, Field
from optax_largebatch.params.leaves import Leaves
from optax_largebatch.params.placement import replicated
from optax_largebatch.params.stacked import Stacked, check_stacked


@dataclasses.dataclass(frozen=True)
class VectorOfBlocks(Field):
    """One vector with a number for each block of all parameters.

    The numbers are in the order of `jax.tree.leaves`; for a leaf that stacks layers, in the order
    of its layers.

    The vector is written in each step and not read: a leaf program finds None in its place, and
    returns a number, or one for each block.

    Args:
        stacked: the parameters that stack layers; None for those of the transform.
        initial: the value of all numbers before the first step.
    """

    stacked: Stacked | None = None
    initial: float = 0.0

    def init(self, params: optax.Params) -> jax.Array:
        blocks = sum(check_stacked(self.stacked).sizes(params))
        dtype = norms.accumulation_dtype(*map(jnp.result_type, jax.tree.leaves(params)))
        return replicated(jnp.full(blocks, self.initial, dtype), params)

    def split(self, name: str, value: Any, leaves: Leaves) -> Sequence[Any]:
        return [None] * len(leaves.arrays)

    def kinds(self, part: Any) -> Any:
        return jax.tree.map(lambda _: "per block", part)

    def join(self, name: str, old: Any, parts: list[Any], leaves: Leaves, concat: Concat) -> Any:
        return one_for_each_block(name, old, parts, check_stacked(self.stacked), leaves, concat)


@dataclasses.dataclass(frozen=True)
class NumberPerBlock(VectorOfBlocks):
    """The same vector for numbers that the next step reads; zeros at first.

    A leaf program finds the numbers of its blocks in an array that broadcasts: it has the axes of
    the leaf, with length 1 for axes that are not stacked, or no axes if the leaf is one block.
    """

    def split(self, name: str, value: Any, leaves: Leaves) -> Sequence[Any]:
        parts, start = [], 0
        axes = check_stacked(self.stacked).axes(leaves.tree)
        shapes = [_whole_shape(leaves, index, own) for index, own in enumerate(axes)]
        _check_blocks(name, value, sum(map(math.prod, shapes)))
        for index, shape in enumerate(shapes):
            end = start + math.prod(shape)
            own = jnp.reshape(value[start:end], shape)
            for axis in axes[index]:
                own = norms.own_part(own, axis, leaves.axes_along(index, axis))
            # On a mesh of explicit axes, what a step chooses between must be split alike.
            of_leaf = norms.explicit_spec(leaves.arrays[index])
            spec = (name if k in axes[index] else None for k, name in enumerate(of_leaf))
            parts.append(norms.with_spec(own, PartitionSpec(*spec)))
            start = end
        return parts


def of_stacks(field: Any, stacked: Stacked) -> Any:
    """The field, which goes by these stacks unless it names others itself."""
    if isinstance(field, VectorOfBlocks) and field.stacked is None:
        return dataclasses.replace(field, stacked=stacked)
    return field


def one_for_each_block(
    name: str,
    old: jax.Array,
    entries: Sequence[Any],
    stacked: Stacked,
    leaves: Leaves,
    concat: Concat,
) -> jax.Array:
    """A vector with one entry for each block, from what the leaf programs returned.

    Args:
        name: the vector's name, for the message.
        old: the vector of the step before.
        entries: for each leaf an array with one element for each of its blocks, a number for all
            of them, or None where there was no gradient and the old entries stay.
        stacked: the stacks.
        leaves: the leaves.
        concat: makes one vector of the entries.

    Returns:
        The new vector, the same on all devices.

    Raises:
        ValueError: the parameters have more or fewer blocks than they had at `init`.
    """
    parts: list[Any] = []
    start = 0
    for index, axes in enumerate(stacked.axes(leaves.tree)):
        entry = 0 if entries[index] is None else entries[index]
        if axes or isinstance(entry, jax.Array):
            own = blocks_of_leaf(jnp.asarray(entry, old.dtype), index, axes, leaves)
        else:
            own = np.full(1, entry, old.dtype)
        parts.append(old[start : start + own.size] if entries[index] is None else own)
        start += own.size
    _check_blocks(name, old, start)
    return concat(_known_together(parts)) if parts else old


def _check_blocks(name: str, vector: jax.Array, blocks: int) -> None:
    """Checks that a vector has an entry for each block."""
    if vector.shape != (blocks,):
        raise ValueError(
            f"the state's {name} must have an entry for each block: it has the shape "
            f"{vector.shape}, and the parameters have {blocks} blocks. It belongs to other "
            "parameters or options, or has an axis for several models. Call `init` of this "
            "optimizer with the whole parameters (outside of shard_map, where a stack is split "
            "between its layers) and the same `stacked`."
        )


def _whole_shape(leaves: Leaves, index: int, axes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an array with a number for each block of a leaf, those of all devices."""
    if not axes:
        return ()
    leaves.split(index, axes)  # says it if the type does not tell which axis is split
    lengths = (
        size * norms.devices_along(leaves.axes_along(index, axis)) if axis in axes else 1
        for axis, size in enumerate(leaves.arrays[index].shape)
    )
    return tuple(lengths)


def blocks_of_leaf(
    entry: jax.Array, index: int, axes: tuple[int, ...], leaves: Leaves
) -> jax.Array:
    """A vector with one entry for each block of a leaf, the same on all devices."""
    if not axes:
        return jax.lax.reshape(entry, (1,))
    shape = enumerate(leaves.arrays[index].shape)
    own = jnp.broadcast_to(entry, [size if axis in axes else 1 for axis, size in shape])
    for axis in axes:
        own = norms.gathered(own, axis, leaves.axes_along(index, axis))
    return jnp.ravel(own)


def _known_together(parts: Sequence[Any]) -> list[jax.Array]:
    """The same entries; those that are known already, as arrays of NumPy, in as few as possible."""
    together: list[Any] = []
    for known, run in itertools.groupby(parts, lambda x: isinstance(x, np.ndarray)):
        entries = list(run)
        together += [jnp.asarray(np.concatenate(entries))] if known else entries
    return together
