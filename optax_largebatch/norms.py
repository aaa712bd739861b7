"""Sums and norms of blocks: the one place of this library that computes them.

A *block* is what one norm is taken over: a leaf of the parameter tree, or a slice of a leaf that
stacks several layers. Under `jit` a sharded leaf is still one array, and the compiler adds up its
shards. Inside `jax.shard_map` and `jax.pmap` a leaf is a shard, and its sums are added up here.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

Key = TypeVar("Key", bound=Hashable)


def accumulation_dtype(*dtypes: jax.typing.DTypeLike) -> jnp.dtype:
    """The dtype in which norms and moments of such leaves live: float32, or float64 of float64."""
    wide = any(jnp.dtype(dtype) == jnp.float64 for dtype in dtypes)
    return jnp.dtype(jnp.float64 if wide else jnp.float32)


def block_sum(x: jax.Array, kept: tuple[int, ...] = ()) -> jax.Array:
    """The sum over all axes but those `kept`, which keep their place: () or, say, (layers, 1, 1).

    It is accumulated in float32 (float64 for a float64 leaf) whatever the leaf's dtype.
    """
    x = x.astype(accumulation_dtype(x.dtype))
    if not kept:
        return jnp.sum(x)
    others = tuple(axis for axis in range(x.ndim) if axis not in kept)
    return jnp.sum(x, axis=others, keepdims=True)


def sum_of_squares(x: jax.Array, kept: tuple[int, ...] = ()) -> jax.Array:
    """`block_sum(x**2)`, cast before it is squared.

    A norm taken in float16 overflows at 65504 and one taken in bfloat16 is good to two digits;
    XLA fuses the cast into the reduction.
    """
    return block_sum(jnp.square(x.astype(accumulation_dtype(x.dtype))), kept)


class Split(NamedTuple):
    """How the mesh axes of a surrounding `jax.shard_map` or `jax.pmap` split a leaf."""

    within: frozenset[str] = frozenset()
    """Axes that split blocks: each device has a part of every block."""
    between: frozenset[str] = frozenset()
    """Axes that split a stack between its blocks: each device has some whole blocks."""


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The mesh axes of a surrounding `jax.shard_map` along which `x` differs between devices.

    They stand in the array's type, unless `check_vma=False`; outside of `shard_map` there are none.
    """
    kind = jax.typeof(x)
    manual = getattr(kind, "manual_axis_type", None)  # before jax 0.10 the axes stood in `vma`
    return getattr(kind, "vma", frozenset()) if manual is None else manual.varying


def over_shards(sums: Mapping[Key, jax.Array], splits: Mapping[Key, Split]) -> dict[Key, jax.Array]:
    """Sums over whole blocks from those over the parts on each device.

    However many there are, they travel as one vector and take one reduction (and another one for
    stacks that are split between their blocks, which must not be added to each other).
    """
    whole = dict(sums)
    for between in {split.between for split in splits.values()}:
        own = [key for key in sums if splits[key].within and splits[key].between == between]
        axes = frozenset[str]().union(*(splits[key].within for key in own))
        if not axes:
            continue
        dtype = accumulation_dtype(*(sums[key].dtype for key in own))
        vector = jnp.concatenate(
            [
                _counted_once(jnp.ravel(sums[key]).astype(dtype), axes - splits[key].within)
                for key in own
            ]
        )
        vector = jax.lax.psum(vector, tuple(sorted(axes)))
        start = 0
        for key in own:
            like = sums[key]
            part = vector[start : start + like.size]
            whole[key] = part.reshape(like.shape).astype(like.dtype)
            start += like.size
    return whole


def _counted_once(x: jax.Array, repeated: frozenset[str]) -> jax.Array:
    """Zero everywhere but on the first of the devices along axes on which `x` is the same."""
    for axis in sorted(repeated):
        x = jnp.where(jax.lax.axis_index(axis) == 0, x, 0)
    return x


def gathered(x: jax.Array, axis: int, mesh_axes: tuple[str, ...]) -> jax.Array:
    """The whole of an array that is split along `axis`, the same on all devices."""
    if not mesh_axes:
        return x
    devices = jax.lax.psum(1, mesh_axes)
    shape = (*x.shape[:axis], devices * x.shape[axis], *x.shape[axis + 1 :])
    start = jax.lax.axis_index(mesh_axes) * x.shape[axis]
    own = jax.lax.dynamic_update_slice_in_dim(jnp.zeros(shape, x.dtype), x, start, axis)
    return jax.lax.psum(own, mesh_axes)


def parts_of_a_block(split: Split) -> int:
    """The number of devices that have a part of one block."""
    return jax.lax.psum(1, tuple(sorted(split.within))) if split.within else 1


def total(sums: Sequence[jax.Array]) -> jax.Array:
    """The sum of the sums of several blocks, in the widest of their dtypes."""
    dtype = accumulation_dtype(*(part.dtype for part in sums))
    return jnp.sum(jnp.stack([part.astype(dtype) for part in sums]))


def from_sum_of_squares(square: jax.Array) -> jax.Array:
    """The L2 norm; its derivative at 0 is 0, for those who differentiate through an update."""
    zero = square == 0
    return jnp.where(zero, 0, jnp.sqrt(jnp.where(zero, 1, square)))
