"""Norms of blocks: the one place of this library that computes them.

A *block* is what one norm is taken over; today, one leaf of the parameter tree.
"""

from collections.abc import Sequence

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


def block_norms(blocks: Sequence[jax.Array]) -> list[jax.Array]:
    """The L2 norm of each block, in the accumulation dtype of that block.

    The sums of squares travel as one vector, so that whatever has to be done to all of them (a
    square root here, a reduction over devices) is done once and not once for each leaf.
    """
    if not blocks:
        return []
    dtype = accumulation_dtype(*(block.dtype for block in blocks))
    norms = _square_roots(jnp.stack([sum_of_squares(block).astype(dtype) for block in blocks]))
    return [
        norm.astype(accumulation_dtype(block.dtype))
        for norm, block in zip(norms, blocks, strict=True)
    ]


def global_norm(blocks: Sequence[jax.Array]) -> jax.Array:
    """The L2 norm of all blocks taken together, in their widest accumulation dtype."""
    dtype = accumulation_dtype(*(block.dtype for block in blocks))
    sums = jnp.stack([sum_of_squares(block).astype(dtype) for block in blocks])
    return _square_roots(jnp.sum(sums))


def _square_roots(sums: jax.Array) -> jax.Array:
    """Square roots whose derivative at 0 is 0, for those who differentiate through an update."""
    positive = sums > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, sums, 1)), 0)
