"""The range in which the size of a gradient does not matter, as the documentation says it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_largebatch as lb
from tests.helpers import first_step

PARAMS = {"bias": jnp.array([0.3, -0.2]), "kernel": jnp.linspace(-1.0, 2.0, 600).reshape(20, 30)}
DIRECTIONS = jax.tree.map(lambda x: jnp.cos(x) / jnp.linalg.norm(jnp.cos(x).ravel()), PARAMS)


def step(norm):
    """LANS's first step, with a gradient of this norm in each block."""
    gradients = jax.tree.map(lambda x: norm * x, DIRECTIONS)
    optimizer = lb.lans(0.1)
    return first_step(optimizer, gradients, PARAMS)[0]


@pytest.mark.parametrize("norm", [1e-15, 1e-6, 1e10, 1e18])
def test_within_it_the_steps_are_those_of_a_gradient_of_norm_1(norm):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4), step(norm), step(1.0))


@pytest.mark.parametrize("norm", [1e-30, 1e30])
def test_beyond_it_they_are_not(norm):
    assert not np.allclose(step(norm)["kernel"], step(1.0)["kernel"], rtol=1e-2)
