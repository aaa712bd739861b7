"""Fields of a state with one number for each block."""

from collections.abc import Sequence
import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_largebatch import norms
from optax_largebatch.engine.state import Concat, Field, TreeLikeParameters
from optax_largebatch.params.leaves import Leaves
from optax_largebatch.params.stacked import Stacked, check_stacked


@dataclasses.dataclass(frozen=True)
class NumberPerBlock(TreeLikeParameters):
    """One number for each block, in a tree like the parameters; zeros at first.

    Each array has the axes of its parameter, with length 1 for axes that are not stacked, so that
    it broadcasts.

    Args:
        stacked: the parameters that stack layers; None for those of the transform.
    """

    stacked: Stacked | None = None

    def init(self, params: optax.Params) -> Any:
        return check_stacked(self.stacked).numbers(params)

    def split(self, name: str, value: Any, leaves: Leaves) -> Sequence[Any]:
        axes = check_stacked(self.stacked).axes(leaves.tree)
        return leaves.alike(
            f"the state's {name}",
            value,
            lambda index: norms.shape_of_blocks(leaves.arrays[index].shape, axes[index]),
        )


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
        return jnp.full(sum(check_stacked(self.stacked).sizes(params)), self.initial, jnp.float32)

    def split(self, name: str, value: Any, leaves: Leaves) -> Sequence[Any]:
        return [None] * len(leaves.arrays)

    def like_leaf(self, part: Any) -> Any:
        return jax.tree.map(lambda _: True, part)

    def join(self, name: str, old: Any, parts: list[Any], leaves: Leaves, concat: Concat) -> Any:
        return one_for_each_block(name, old, parts, check_stacked(self.stacked), leaves, concat)


def of_stacks(field: Any, stacked: Stacked) -> Any:
    """The field, which goes by these stacks unless it names others itself."""
    if isinstance(field, NumberPerBlock | VectorOfBlocks) and field.stacked is None:
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
    if start != old.size:
        raise ValueError(
            f"the state's {name} has {old.size} entries and the parameters have {start} blocks. "
            "Call `init` with the whole parameters (outside of shard_map, where a stack is split "
            "between its layers) and with the same `stacked`."
        )
    return concat(_known_together(parts)) if parts else old


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
