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


def total(sums: Sequence[jax.Array]) -> jax.Array:
    """The sum of the sums of squares of several blocks, in the widest of their dtypes."""
    dtype = accumulation_dtype(*(part.dtype for part in sums))
    return jnp.sum(jnp.stack([part.astype(dtype) for part in sums]))


def from_sum_of_squares(square: jax.Array) -> jax.Array:
    """The L2 norm; its derivative at 0 is 0, for those who differentiate through an update."""
    positive = square > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, square, 1)), 0)
