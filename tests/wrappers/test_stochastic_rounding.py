"""Low-precision parameters that are rounded at random, and right on average."""

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
from numpy.testing import assert_array_equal
import optax
import pytest

import optax_largebatch as lb
from tests.helpers import first_step
from tests.wrappers.steps import EIGHT_DEVICES, in_shards

LOW = ("bfloat16", "float16")
TARGETS = optax.stateless(lambda targets, params: jax.tree.map(jnp.subtract, targets, params))
"""An inner transformation that goes where the "gradients" say."""
SAMPLES = 20_000


# `optax.apply_updates` adds a float32 update to a bfloat16 parameter.
pytestmark = pytest.mark.usefixtures("standard_promotion")


def moved(targets, dtype, start=0.0):
    """Where parameters come to that aim at the targets, an array."""
    optimizer = lb.stochastic_rounding(TARGETS)
    params = jnp.full(np.shape(targets), start, dtype)

    @jax.jit
    def step(params, targets):
        updates, _ = first_step(optimizer, targets, params)
        return optax.apply_updates(params, updates)

    result = step(params, jnp.asarray(targets, "float32"))
    assert result.dtype == params.dtype
    return np.asarray(result, "float64")


def neighbours(x, dtype):
    """The largest number of a dtype that is no more than `x`, and the smallest that is no less."""
    nearest = x.astype(jnp.dtype(dtype))
    below, above = (
        np.nextafter(nearest, np.full_like(nearest, end)).astype("float64")
        for end in (-np.inf, np.inf)
    )
    nearest = nearest.astype("float64")
    return np.where(nearest > x, below, nearest), np.where(nearest < x, above, nearest)


ORDINARY = {
    "bfloat16": [1.001, -1.001, 1.9999, 3e-5, -7e30, 1e-30, 0.3],
    "float16": [1.0001, -1.0001, 1.9999, 3e-5, -6.001e4, 1e-7, 2e-8, 0.3],
}
"""With numbers that are subnormal in float16, and one whose upper neighbour is a power of two."""


@pytest.mark.parametrize("dtype", LOW)
def test_the_mean_is_exact(dtype):
    targets = np.tile(np.asarray(ORDINARY[dtype], "float32")[:, None], SAMPLES)
    results = moved(targets, dtype)
    low, high = neighbours(targets.astype("float64"), dtype)
    assert np.all((results == low) | (results == high))
    gap = (high - low)[:, 0]
    assert np.all(gap > 0)
    share = (targets[:, 0] - low[:, 0]) / gap
    sigma = np.sqrt(share * (1 - share) / SAMPLES)
    error = (results.mean(axis=1) - targets[:, 0]) / gap
    assert np.all(np.abs(error) < 4 * sigma + 2**-16)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("start", [0.0, -0.7, 3.0])
def test_what_the_dtype_holds_is_reached_exactly(dtype, start):
    """Every number of the dtype that is not so small that float32 loses it beside the start."""
    infinity = int(np.asarray(np.inf, jnp.dtype(dtype)).view("uint16"))
    positive = np.arange(infinity + 1, dtype="uint16").view(jnp.dtype(dtype)).astype("float64")
    every = np.concatenate([positive, -positive])
    smallest = max(np.abs(start) * 2.0**-12, 1e-37)
    kept = every[(np.abs(every) > smallest) | (every == 0)]
    assert_array_equal(moved(kept, dtype, start), kept)


@pytest.mark.parametrize("dtype", LOW)
def test_beyond_the_range_it_is_the_nearest(dtype):
    largest = float(jnp.finfo(dtype).max)
    beyond = np.array([np.inf, -np.inf, np.nan, largest * 1.0001, -largest * 1.0015], "float32")
    expected = np.asarray(jnp.asarray(beyond).astype(dtype), "float64")
    assert_array_equal(moved(beyond, dtype), expected)


def patterns(steps, **seed):
    """Which elements of two equal leaves are rounded up, in each of some steps."""
    params = {name: jnp.ones(256, "bfloat16") for name in ("a", "b")}
    targets = jax.tree.map(lambda x: jnp.full(x.shape, 1 + 2**-8), params)
    optimizer = lb.stochastic_rounding(TARGETS, **seed)
    state = optimizer.init(params)
    step = jax.jit(optimizer.update)
    for _ in range(steps):
        updates, state = step(targets, state, params)
        yield from (np.asarray(update) > 0 for update in updates.values())


def test_seeds_steps_and_leaves_have_their_own_numbers():
    of_both = [*patterns(2, seed=0), *patterns(2, seed=1)]
    for index, pattern in enumerate(of_both):
        for other in of_both[:index]:
            assert 64 < np.sum(pattern != other) < 192
    assert_array_equal(of_both, [*patterns(2), *patterns(2, seed=1)])


def test_inner_sees_float32():
    """Its state too is that of float32 parameters, and waiting moves nothing."""
    params = {"low": jnp.full(3, 1.5, "bfloat16"), "full": jnp.ones(2)}
    inner = lb.accumulate_gradients(optax.sgd(0.1, momentum=0.9), every=2)
    optimizer = lb.stochastic_rounding(inner)
    state = optimizer.init(params)
    full = optax.tree.cast(params, "float32")
    chex.assert_trees_all_equal_shapes_and_dtypes(state.inner_state, inner.init(full))
    step = jax.jit(optimizer.update)
    updates, state = step(params, state, params)
    chex.assert_trees_all_equal(updates, jax.tree.map(jnp.zeros_like, full))
    updates, _ = step(params, state, params)
    assert all(np.all(np.asarray(update) < 0) for update in updates.values())


def test_a_parameter_without_a_gradient_stays():
    params = {"moves": jnp.ones(1, "float16"), "stays": jnp.ones(1, "float16")}
    optimizer = lb.stochastic_rounding(optax.sgd(0.1))
    gradients = params | {"stays": None}
    updates, _ = jax.jit(optimizer.update)(gradients, optimizer.init(params), params)
    assert updates["stays"] is None


@EIGHT_DEVICES
@pytest.mark.parametrize("check_vma", [True, False])
def test_devices(check_vma):
    """The same on all for a whole leaf, each its own for a split one."""
    specs = {"split": P("fsdp"), "whole": P()}
    params = {"split": jnp.ones((8, 256), "bfloat16"), "whole": jnp.ones(256, "bfloat16")}
    optimizer = lb.stochastic_rounding(optax.sgd(2**-9))

    def step(params):
        told = None if check_vma else specs
        updates, _ = first_step(optimizer, params, params, partition_specs=told)
        params = optax.apply_updates(params, updates)
        return params | {"whole": params["whole"][None]}

    out_specs = specs | {"whole": P() if check_vma else P("fsdp")}
    updated = in_shards(step, (specs,), out_specs, check_vma)(params)
    result = jax.tree.map(lambda x: np.asarray(x, "float32"), updated)
    assert np.all(result["whole"] == result["whole"][0])
    for device in range(1, 8):
        assert 64 < np.sum(result["split"][device] != result["split"][0]) < 192
