"""Norms of blocks, whatever the dtype and the size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_largebatch import norms


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_accumulates_in_float32(dtype):
    """In float16 the first overflows and the second underflows; in bfloat16 both stall."""
    large = jnp.full((1024, 1024), 1.0, dtype)
    small = jnp.full((1024, 1024), 1e-4, dtype)
    large_norm, small_norm = norms.block_norms([large, small])
    assert large_norm.dtype == small_norm.dtype == jnp.float32
    np.testing.assert_allclose(large_norm, 1024.0, rtol=1e-6)
    np.testing.assert_allclose(small_norm, 1024.0 * float(small[0, 0]), rtol=1e-5)


def test_float64_blocks_are_accumulated_in_float64(x64):
    x = jnp.asarray([1.0, 1e-9], "float64")
    (norm,) = norms.block_norms([x])
    assert norm.dtype == jnp.float64
    np.testing.assert_allclose(norm - 1, 5e-19, atol=1e-16)
    mixed = norms.block_norms([x, x.astype("bfloat16")])
    assert [m.dtype for m in mixed] == ["float64", "float32"]


def test_scalars_and_empty_blocks():
    scalar, empty = norms.block_norms([jnp.asarray(-3.0), jnp.zeros((0, 4))])
    assert (scalar, empty) == (3.0, 0.0)
    assert norms.block_norms([]) == []


def test_global_norm_is_the_norm_of_the_norms():
    blocks = [jnp.asarray([3.0]), jnp.asarray([[4.0]], "bfloat16"), jnp.asarray(12.0)]
    np.testing.assert_allclose(norms.global_norm(blocks), 13.0, rtol=1e-6)


def test_derivative_at_zero_is_zero():
    gradient = jax.grad(lambda x: norms.block_norms([x])[0])(jnp.zeros(3))
    np.testing.assert_array_equal(gradient, np.zeros(3))


def test_thirty_million_elements():
    """A float32 sum, one element after the other, would be off by percents."""
    x = jnp.ones((30_000_000,), "float32")
    np.testing.assert_allclose(norms.block_norms([x])[0], np.sqrt(3e7), rtol=1e-6)
