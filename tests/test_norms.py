"""Norms of blocks, whatever the dtype and the size."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose
import pytest

from optax_largebatch import norms


def norm(x):
    return norms.from_sum_of_squares(norms.sum_of_squares(x))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_accumulates_in_float32(dtype):
    """In float16 the first overflows and the second underflows; in bfloat16 both stall."""
    large = jnp.full((1024, 1024), 1.0, dtype)
    small = jnp.full((1024, 1024), 1e-4, dtype)
    large_norm, small_norm = norm(large), norm(small)
    assert large_norm.dtype == small_norm.dtype == jnp.float32
    assert_allclose(large_norm, 1024.0, rtol=1e-6)
    assert_allclose(small_norm, 1024.0 * float(small[0, 0]), rtol=1e-5)


def test_float64_blocks_are_accumulated_in_float64(x64):
    x = jnp.asarray([1.0, 1e-9], "float64")
    assert norm(x).dtype == jnp.float64
    assert_allclose(norm(x) - 1, 5e-19, atol=1e-16)
    assert norm(x.astype("bfloat16")).dtype == jnp.float32


def test_total_of_blocks_of_several_dtypes(x64):
    blocks = [jnp.asarray([3.0], "float32"), jnp.asarray([[4.0]], "bfloat16"), jnp.asarray(12.0)]
    total = norms.total([norms.sum_of_squares(block) for block in blocks])
    assert total.dtype == jnp.float64
    assert_allclose(norms.from_sum_of_squares(total), 13.0, rtol=1e-12)


def test_thirty_million_elements():
    """A float32 sum, one element after the other, would be off by percents."""
    x = jnp.ones((30_000_000,), "float32")
    assert_allclose(norm(x), np.sqrt(3e7), rtol=1e-6)


def test_sums_are_reduced_in_the_order_of_their_leaves():
    """All processes of a run must reduce in one order, and a set of names has another in each."""
    sums = [jnp.ones(k) for k in range(6)]
    splits = [norms.Split(frozenset("x"), frozenset(name)) for name in "abcdef"]
    reduce = jax.make_jaxpr(lambda sums: norms.over_shards(sums, splits), axis_env=[("x", 8)])
    assert re.findall(r"f32\[(\d)\] = psum", str(reduce(sums))) == [*"012345"]
