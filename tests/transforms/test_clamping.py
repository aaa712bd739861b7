"""Clamping: what the parameters are after the step."""

import jax.numpy as jnp
from numpy.testing import assert_allclose
import optax
import pytest

import optax_largebatch as lb
from tests.helpers import first_step

PARAMS = {"vector": jnp.array([1.5, -2.5, 0.0]), "scalar": jnp.asarray(3.0), "one": jnp.ones(1)}
STEP = {"vector": jnp.array([1.0, 0.0, -0.5]), "scalar": jnp.asarray(1.0), "one": -4 * jnp.ones(1)}


def after(steps, **settings):
    transform = lb.clamp_parameters(2.0, **settings)
    state = transform.init(PARAMS)
    for _ in range(steps):
        updates, state = transform.update(STEP, state, PARAMS)
    return optax.apply_updates(PARAMS, updates)


@pytest.mark.parametrize("steps", [1, 4, 7])
def test_every_period_starts_with_one(steps):
    params = after(steps, period=3)
    assert_allclose(params["vector"], [2.0, -2.0, -0.5], rtol=1e-6)
    assert_allclose([params["scalar"], *params["one"]], [2.0, -2.0], rtol=1e-6)


@pytest.mark.parametrize("steps", [2, 3])
def test_nothing_in_between(steps):
    params = after(steps, period=3)
    assert_allclose(params["vector"], [2.5, -2.5, -0.5], rtol=1e-6)


def test_scalars_only():
    params = after(1, scalars_only=True)
    assert_allclose(params["vector"], [2.5, -2.5, -0.5], rtol=1e-6)
    assert_allclose([params["scalar"], *params["one"]], [2.0, -2.0], rtol=1e-6)


def test_a_stack_of_scalars_is_scalars():
    transform = lb.clamp_parameters(
        2.0, scalars_only=True, stacked=lb.stacked_layers({"vector": 0})
    )
    updates, _ = first_step(transform, STEP, PARAMS)
    assert_allclose(updates["vector"], [0.5, 0.5, -0.5], rtol=1e-6)
