"""Division by the second moment, in each of its corrections."""

import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import pytest

import optax_largebatch as lb
from tests.helpers import first_step

B2, EPS = 0.9, 1e-3
PARAMS = {"vector": jnp.ones(3), "scalar": jnp.asarray(1.0)}


def gradient(t):
    return np.cos(np.arange(3.0) + t) + 1.5


def run(steps, **settings):
    transform = lb.scale_by_second_moment(B2, eps=EPS, **settings)
    state = transform.init(PARAMS)
    for t in range(steps):
        g = jnp.asarray(gradient(t), "float32")
        updates, state = transform.update({"vector": g, "scalar": g[0]}, state, PARAMS)
    return updates


@pytest.mark.parametrize("steps", [1, 2, 30, 60])
@pytest.mark.parametrize("mode", ["full", "early", "lagged"])
def test_corrections(mode, steps):
    nu = 0.0
    for t in range(steps):
        nu = B2 * nu + (1 - B2) * gradient(t) ** 2
    corrected, lagged = 1 - B2**steps, 1 - B2 ** (steps - 1)
    divided = corrected if mode == "full" or (mode == "early" and corrected < 0.99) else 1.0
    expected = gradient(steps - 1) / (np.sqrt(nu / divided) + EPS)
    updates = run(steps, bias_correction=mode)
    factor, factor_of_one = (lagged, np.sqrt(lagged)) if mode == "lagged" else (1.0, 1.0)
    assert_allclose(updates["vector"], factor * expected, rtol=1e-5)
    assert_allclose(updates["scalar"], factor_of_one * expected[0], rtol=1e-5)


def test_layers_of_one_element_are_blocks_of_one_element():
    updates = run(3, bias_correction="lagged", stacked=lb.stacked_layers({"vector": 0}))
    assert_allclose(updates["vector"][0], updates["scalar"], rtol=1e-6)


def test_no_epsilon_and_no_gradient():
    transform = lb.scale_by_second_moment(eps=0.0)
    gradient = jnp.array([0.0, -1e-20])
    updates, _ = first_step(transform, gradient, gradient)
    assert_array_equal(updates, [0.0, 0.0])
