"""The learned scale: RMSprop on the sums of parameter times gradient."""

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import pytest

import optax_largebatch as lb
from tests.helpers import first_step

STEPS = 12


def formula(params, gradients, *, rate, b1, b2, eps, speed, period):
    """The step at every time, from the definition; parameters do not move."""
    mu = nu = 0.0
    sums = []
    for t, gradient in enumerate(gradients, start=1):
        sums.append((params * gradient).sum())
        if t % period:
            yield np.zeros_like(params)
            continue
        last = np.array(sums[-period:])
        mu = b1**period * mu + (1 - b1**period) * last.mean()
        nu = b2**period * nu + (1 - b2**period) * (last**2).mean()
        correction = np.sqrt(1 - b2**t)
        yield -period * rate * speed * correction * mu / (np.sqrt(nu) + eps) * params


@pytest.mark.parametrize("settings", [(0.0, 1), (0.6, 1), (0.0, 4), (0.6, 4)])
def test_equals_the_formula(settings, x64):
    b1, period = settings
    random = np.random.default_rng(0)
    params, gradients = random.normal(size=(3, 2)), random.normal(size=(STEPS, 3, 2))
    transform = lb.learn_log_scale(0.1, b1=b1, b2=0.9, eps=1e-3, speed=0.5, period=period)
    weights = jnp.asarray(params)

    def step(state, gradient):
        updates, state = transform.update(gradient, state, weights)
        return state, updates

    _, updates = jax.lax.scan(step, transform.init(weights), jnp.asarray(gradients))
    expected = formula(
        params, gradients, rate=0.1, b1=b1, b2=0.9, eps=1e-3, speed=0.5, period=period
    )
    assert_allclose(updates, np.stack(list(expected)), rtol=1e-12, atol=1e-15)


def change(size, gradient, **settings):
    """The relative change of a tensor of the given size; without bounds it would be 0.5."""
    params = size * jnp.array([1.0, -1.0])
    transform = lb.learn_log_scale(1.0, b2=0.0, speed=0.5, rms_bounds=(0.1, 2.0), **settings)
    updates, _ = first_step(transform, gradient * params, params)
    return float(updates[0] / params[0])


@pytest.mark.parametrize(
    ("size", "gradient", "settings", "expected"),
    [
        (1.0, -1, {}, 0.5),
        (1.0, -1, {"max_change": 0.1}, 0.1),
        (1.6, -1, {}, 0.25),
        (1.0, 0, {}, 0.0),
        (4.0, -1, {}, -0.5),
        (0.05, -1, {}, 0.0),
        (0.05, 1, {}, 0.0),
        (1.6, -1, {"at_bounds": "return"}, 0.5),
        (4.0, -1, {"at_bounds": "return"}, -0.5),
        (0.05, 1, {"at_bounds": "return"}, 0.5),
    ],
)
def test_bounds(size, gradient, settings, expected):
    assert change(size, gradient, **settings) == pytest.approx(expected, rel=1e-5)


def test_a_tensor_of_zeros_and_one_of_one_element_have_no_scale():
    params = {"zeros": jnp.zeros(3), "one": jnp.ones(1)}
    transform = lb.learn_log_scale(1.0, rms_bounds=(None, 3.0))
    ones = jax.tree.map(jnp.ones_like, params)
    updates, _ = first_step(transform, ones, params)
    assert_array_equal(updates["zeros"], 0)
    assert_array_equal(updates["one"], 0)
