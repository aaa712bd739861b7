"""The factor of each block is the size of its parameters, within bounds."""

import jax.numpy as jnp
from numpy.testing import assert_allclose
import pytest

import optax_largebatch as lb
from tests.helpers import first_step

PARAMS = {"big": 6 * jnp.array([1.0, -1.0]), "zero": jnp.zeros(2), "scalar": jnp.asarray(5.0)}
ONES = {name: jnp.ones_like(leaf) for name, leaf in PARAMS.items()}


def factors(**settings):
    transform = lb.scale_by_parameter_rms(**settings)
    return first_step(transform, ONES, PARAMS)[0]


@pytest.mark.parametrize(
    ("settings", "big", "zero", "scalar"),
    [
        ({}, 6.0, 1e-5, 1.0),
        ({"min_rms": 0.1}, 6.0, 0.1, 1.0),
        ({"scalar_scale": 0.1}, 6.0, 1e-5, 0.1),
        ({"period": 4}, 6.0, 1e-5, 1.0),
    ],
)
def test_settings(settings, big, zero, scalar):
    updates = factors(**settings)
    assert_allclose(updates["big"], big, rtol=1e-6)
    assert_allclose(updates["zero"], zero, rtol=1e-6)
    assert_allclose(updates["scalar"], scalar, rtol=1e-6)


def test_looks_in_the_first_step_and_at_the_end_of_each_period():
    transform = lb.scale_by_parameter_rms(period=3)
    state = transform.init(jnp.ones(2))
    seen = []
    for size in range(1, 9):
        updates, state = transform.update(jnp.ones(2), state, size * jnp.ones(2))
        seen.append(float(updates[0]))
    assert_allclose(seen, [1, 1, 3, 3, 3, 6, 6, 6], rtol=1e-6)
