"""Clipping by the median of recent norms."""

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import pytest

import optax_largebatch as lb

PARAMS = {"vector": 2 * jnp.array([1.0, -1.0, 1.0, -1.0]), "scalar": jnp.asarray(7.0)}
UNIT = {"vector": 0.3 * PARAMS["vector"] / 2, "scalar": jnp.asarray(16.0)}
"""A gradient of norm `hypot(2 * 0.6, 0.1 * 16)` = 2, in the units of relative changes."""


def clipped(norms, scale=1.5, window=100):
    """The norms of the gradients after clipping, given those before."""
    transform = lb.clip_by_median_norm(scale, window=window)

    def step(state, norm):
        gradient = jax.tree.map(lambda x: norm / 2 * x, UNIT)
        updates, state = transform.update(gradient, state, PARAMS)
        return state, updates["scalar"]

    norms = jnp.asarray(norms, "float32")
    state, left = jax.lax.scan(step, transform.init(PARAMS), norms)
    return np.asarray(left) / 8, state


def thresholds(norms, scale, window):
    """The threshold of every step, from the definition."""
    threshold = np.inf
    for t in range(len(norms)):
        if t > 0 and t % window == 0:
            known = np.sort(norms[max(t - window + 1, 1) : t + 1])
            threshold = scale * known[min(2 * (len(known) // 4), len(known) - 1)]
        elif t in (10, 20, 40) and t < window:
            known = np.sort(norms[1 : t + 1])
            threshold = 2 * scale * known[min(2 * (len(known) // 4), len(known) - 1)]
        yield threshold


@pytest.mark.parametrize("window", [8, 32, 100])
def test_equals_the_definition(window):
    norms = np.exp(np.random.default_rng(0).normal(size=230))
    left, _ = clipped(norms, 1.1, window)
    expected = np.minimum(norms, list(thresholds(norms, 1.1, window)))
    assert_allclose(left, expected, rtol=1e-5)
    assert np.sum(expected < norms) > 40


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("when", [0, 5, 30])
def test_a_gradient_that_is_not_finite_becomes_zero(bad, when):
    transform = lb.clip_by_median_norm(1.5)
    state = transform.init(PARAMS)
    update = jax.jit(transform.update)
    for _ in range(when):
        _, state = update(UNIT, state, PARAMS)
    updates, state = update({"vector": UNIT["vector"].at[0].set(bad), "scalar": 1.0}, state, PARAMS)
    assert_array_equal(updates["vector"], 0)
    assert_array_equal(updates["scalar"], 0)
    updates, _ = update(UNIT, state, PARAMS)
    assert_allclose(updates["scalar"], UNIT["scalar"], rtol=1e-6)


def test_a_median_that_is_not_finite_sets_no_threshold():
    norms = np.ones(25)
    norms[5:9] = norms[11:21] = np.nan
    assert float(clipped(norms[:11])[1].threshold) == pytest.approx(3.0)
    assert float(clipped(norms)[1].threshold) == pytest.approx(3.0)


def test_a_median_of_zero_sets_no_threshold():
    norms = np.ones(13)
    norms[1:8] = 0
    assert_allclose(clipped(norms)[0], norms, rtol=1e-6)


def test_a_first_leaf_without_a_gradient_keeps_the_history():
    transform = lb.clip_by_median_norm(1.5)
    params = {"frozen": jnp.ones(3), "vector": jnp.ones(3)}
    state = transform.init(params)
    for _ in range(3):
        updates, state = transform.update({"frozen": None, "vector": jnp.ones(3)}, state, params)
    assert updates["frozen"] is None
    assert_allclose(state.norms[:4], [0, 3**0.5, 3**0.5, 0], rtol=1e-6)


def test_no_clipping():
    norms = np.geomspace(1, 1e4, 50)
    left, state = clipped(norms, None)
    assert_allclose(left, norms, rtol=1e-6)
    assert int(state.count) == 50
