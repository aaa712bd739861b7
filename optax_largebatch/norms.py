"""Norms of blocks: the one place of this library that computes them.

A *block* is what one norm is taken over; today, one leaf of the parameter tree. Under `jit` a
sharded leaf is still one array, and the compiler adds up its shards. Inside `jax.shard_map` a leaf
is a shard, and the sums of squares are added up here, over the axes that its type names.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def accumulation_dtype(*dtypes: jax.typing.DTypeLike) -> jnp.dtype:
    """The dtype in which norms and moments of such leaves live: float32, or float64 of float64."""
    wide = any(jnp.dtype(dtype) == jnp.float64 for dtype in dtypes)
    return jnp.dtype(jnp.float64 if wide else jnp.float32)


def sum_of_squares(x: jax.Array) -> jax.Array:
    """`sum(x**2)`, accumulated in float32 (float64 for a float64 leaf) whatever the leaf's dtype.

    A norm taken in float16 overflows at 65504 and one taken in bfloat16 is good to two digits,
    so the cast comes before the square; XLA fuses it into the reduction.
    """
    return jnp.sum(jnp.square(x.astype(accumulation_dtype(x.dtype))))


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The mesh axes of a surrounding `jax.shard_map` along which `x` is split.

    They stand in the array's type, unless `check_vma=False`; outside of `shard_map` there are none.
    """
    kind = jax.typeof(x)
    manual = getattr(kind, "manual_axis_type", None)  # before jax 0.10 the axes stood in `vma`
    return getattr(kind, "vma", frozenset()) if manual is None else manual.varying


def over_shards(sums: Mapping[int, Any], axes: Mapping[int, frozenset[str]]) -> dict[int, Any]:
    """Sums of squares of whole blocks from those of shards.

    Those that are split along the same axes travel as one vector, so that however many leaves
    there are, they take one reduction.
    """
    whole = dict(sums)
    for some in set(axes.values()) - {frozenset()}:
        parts, structure = jax.tree.flatten({i: own for i, own in sums.items() if axes[i] == some})
        if parts:
            dtype = accumulation_dtype(*(part.dtype for part in parts))
            vector = jnp.stack([part.astype(dtype) for part in parts])
            vector = jax.lax.psum(vector, tuple(sorted(some)))
            whole |= structure.unflatten(
                [vector[k].astype(part.dtype) for k, part in enumerate(parts)]
            )
    return whole


def total(sums: Sequence[jax.Array]) -> jax.Array:
    """The sum of the sums of squares of several blocks, in the widest of their dtypes."""
    dtype = accumulation_dtype(*(part.dtype for part in sums))
    return jnp.sum(jnp.stack([part.astype(dtype) for part in sums]))


def from_sum_of_squares(square: jax.Array) -> jax.Array:
    """The L2 norm; its derivative at 0 is 0, for those who differentiate through an update."""
    positive = square > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, square, 1)), 0)
