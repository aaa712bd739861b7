"""Declarations of the state that a transform keeps from step to step.

A declaration is the transform's own state, a NamedTuple, with one of these fields in the place of
each array::

    declare(MomentumState, count=Counter(), trace=PerParameter())

The declaration makes the first state, gives each leaf its part and puts the new parts together. So
nothing undeclared is kept, and nothing declared gets lost.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import itertools
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_largebatch import norms
from optax_largebatch.numerics import zeros_like
from optax_largebatch.params.leaves import Leaves
from optax_largebatch.params.paths import leaf_names, stands_for_all
from optax_largebatch.params.stacked import NOT_STACKED, Stacked

Concatenated = Callable[[list[jax.Array]], jax.Array]
"""Makes one vector of many."""


@runtime_checkable
class Field(Protocol):
    """How one field of a state is made, taken apart by leaves and put together again."""

    def init(self, params: optax.Params) -> Any:
        """The value of the field before the first step."""
        ...

    def split(self, name: str, value: Any, leaves: Leaves) -> Sequence[Any]:
        """The part of the field for each leaf."""
        ...

    def like_leaf(self, part: Any) -> Any:
        """Whether each array in the part of a leaf is split between devices like the leaf."""
        ...

    def join(
        self, name: str, old: Any, parts: list[Any], leaves: Leaves, concatenated: Concatenated
    ) -> Any:
        """The new value, from the old one and the new part of each leaf."""
        ...


@dataclasses.dataclass(frozen=True)
class Counter:
    """The number of steps taken. The engine counts; a leaf program only reads it."""

    def init(self, params: optax.Params) -> jax.Array:
        """0."""
        return jnp.zeros([], jnp.int32)

    def split(self, name: str, value: Any, leaves: Leaves) -> Sequence[Any]:
        check_shape(name, value, ())
        return [value] * len(leaves.arrays)

    def like_leaf(self, part: Any) -> Any:
        return False

    def join(
        self, name: str, old: Any, parts: list[Any], leaves: Leaves, concatenated: Concatenated
    ) -> Any:
        return optax.safe_increment(old)


class _TreeLikeParameters:
    """A tree with an array for each parameter."""

    def split(self, name: str, value: Any, leaves: Leaves) -> Sequence[Any]:
        return leaves.alike(f"the state's {name}", value)

    def like_leaf(self, part: Any) -> Any:
        return jax.tree.map(lambda _: True, part)

    def join(
        self, name: str, old: Any, parts: list[Any], leaves: Leaves, concatenated: Concatenated
    ) -> Any:
        columns = zip(parts, leaves.align(f"the state's {name}", old), strict=True)
        return leaves.rebuild([_cast_like(now, like) for now, like in columns])


@dataclasses.dataclass(frozen=True)
class PerParameter(_TreeLikeParameters):
    """One array for each parameter, of its shape; zeros at first.

    Args:
        dtype: its dtype; None for float32 (float64 for float64 parameters).
    """

    dtype: jax.typing.DTypeLike | None = None

    def init(self, params: optax.Params) -> Any:
        return zeros_like(params, self.dtype)


@dataclasses.dataclass(frozen=True)
class NumberPerBlock(_TreeLikeParameters):
    """One number for each block, in a tree like the parameters; zeros at first.

    Each array has the axes of its parameter, with length 1 for axes that are not stacked, so that
    it broadcasts.

    Args:
        stacked: the parameters that stack layers.
    """

    stacked: Stacked = NOT_STACKED

    def init(self, params: optax.Params) -> Any:
        return self.stacked.numbers(params)

    def split(self, name: str, value: Any, leaves: Leaves) -> Sequence[Any]:
        axes = self.stacked.axes(leaves.tree)
        return leaves.alike(
            f"the state's {name}",
            value,
            lambda index: norms.shape_of_blocks(leaves.arrays[index].shape, axes[index]),
        )


@dataclasses.dataclass(frozen=True)
class PerAxis(_TreeLikeParameters):
    """A tuple of arrays for each parameter, for its axes.

    Every device has these arrays whole, however the parameter is split.

    Args:
        initial: a function from the parameters to the first arrays, as a tree of tuples.
    """

    initial: Callable[[optax.Params], Any]

    def init(self, params: optax.Params) -> Any:
        if stands_for_all(params):
            return 0  # it is nothing like the parameters
        for name, leaf in zip(leaf_names(params), jax.tree.leaves(params), strict=True):
            axes = norms.varying_axes(leaf)
            if axes:
                raise ValueError(
                    f"init must be given whole parameters, because the state has arrays for their "
                    f"axes; {name!r} is split along {', '.join(map(repr, sorted(axes)))}. Call "
                    "init outside of shard_map."
                )
        return self.initial(params)

    def split(self, name: str, value: Any, leaves: Leaves) -> Sequence[Any]:
        return leaves.align(f"the state's {name}", value)

    def like_leaf(self, part: Any) -> Any:
        return jax.tree.map(lambda _: False, part)


@dataclasses.dataclass(frozen=True)
class VectorOfBlocks:
    """One vector with a number for each block of all parameters.

    The numbers are in the order of `jax.tree.leaves`; for a leaf that stacks layers, in the order
    of its layers.

    The vector is written in each step and not read: a leaf program finds None in its place, and
    returns a number, or one for each block.

    Args:
        stacked: the parameters that stack layers.
        initial: the value of all numbers before the first step.
    """

    stacked: Stacked = NOT_STACKED
    initial: float = 0.0

    def init(self, params: optax.Params) -> jax.Array:
        return jnp.full(sum(self.stacked.sizes(params)), self.initial, jnp.float32)

    def split(self, name: str, value: Any, leaves: Leaves) -> Sequence[Any]:
        return [None] * len(leaves.arrays)

    def like_leaf(self, part: Any) -> Any:
        return jax.tree.map(lambda _: True, part)

    def join(
        self, name: str, old: Any, parts: list[Any], leaves: Leaves, concatenated: Concatenated
    ) -> Any:
        return one_for_each_block(name, old, parts, self.stacked, leaves, concatenated)


@dataclasses.dataclass(frozen=True)
class Shared:
    """Arrays that are the same for all leaves.

    A leaf program may compute their new values only from values that are the same for all leaves:
    scalars of the step, other shared fields and norms of all leaves.

    Args:
        initial: a function from the parameters to the first value.
    """

    initial: Callable[[optax.Params], Any]

    def init(self, params: optax.Params) -> Any:
        return self.initial(params)

    def split(self, name: str, value: Any, leaves: Leaves) -> Sequence[Any]:
        return [value] * len(leaves.arrays)

    def like_leaf(self, part: Any) -> Any:
        return jax.tree.map(lambda _: False, part)

    def join(
        self, name: str, old: Any, parts: list[Any], leaves: Leaves, concatenated: Concatenated
    ) -> Any:
        moved = (part for part in parts if part is not old)
        return _cast_like(next(moved, old), old)


@dataclasses.dataclass(frozen=True)
class StateOf:
    """The state of another transform.

    Args:
        transform: the `LeafTransform`.
    """

    transform: Any

    def init(self, params: optax.Params) -> Any:
        return self.transform.init(params)

    def split(self, name: str, value: Any, leaves: Leaves) -> Sequence[Any]:
        return self.transform.split(value, leaves)

    def like_leaf(self, part: Any) -> Any:
        return self.transform.like_leaf(part)

    def join(
        self, name: str, old: Any, parts: list[Any], leaves: Leaves, concatenated: Concatenated
    ) -> Any:
        return self.transform.join(old, parts, leaves, concatenated)


def check_shape(name: str, value: Any, expected: tuple[int, ...]) -> None:
    """Checks an array of a state that does not belong to single leaves.

    Raises:
        ValueError: the array has another shape.
    """
    if jnp.shape(value) != expected:
        raise ValueError(
            f"the state's {name} has the shape {jnp.shape(value)}, and not {expected}. It belongs "
            "to an optimizer with other options, or has an axis for several models. Call `init` "
            "of this optimizer, or restore into the state that `init` returns."
        )


def declare(kind: type[tuple[Any, ...]], **fields: Field) -> Any:
    """The declaration of a state: its NamedTuple, with a `Field` in each place."""
    return kind(**fields)


def names_and_fields(declaration: Any) -> Iterator[tuple[str, Field]]:
    """The fields of a declaration with their names; in a plain tuple they are numbered."""
    names = getattr(declaration, "_fields", map(str, range(len(declaration))))
    return zip(names, declaration, strict=True)


def built_like(declaration: Any, values: Sequence[Any]) -> Any:
    """A state, or a part of one, with these values in its fields."""
    return declaration._make(values) if hasattr(declaration, "_make") else tuple(values)


def _cast_like(now: Any, old: Any) -> Any:
    """New state, with the dtypes of the old."""
    return jax.tree.map(lambda x, like: jnp.asarray(x, like.dtype), now, old)


def one_for_each_block(
    name: str,
    old: jax.Array,
    entries: Sequence[Any],
    stacked: Stacked,
    leaves: Leaves,
    concatenated: Concatenated,
) -> jax.Array:
    """A vector with one entry for each block, from what the leaf programs returned.

    Args:
        name: the vector's name, for the message.
        old: the vector of the step before.
        entries: for each leaf an array with one element for each of its blocks, a number for all
            of them, or None where there was no gradient and the old entries stay.
        stacked: the stacks.
        leaves: the leaves.
        concatenated: makes one vector of the entries.

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
    return concatenated(_known_together(parts)) if parts else old


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
