"""The sizes of parameters as a product of one factor for each axis."""

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import pytest

import optax_largebatch as lb
from optax_largebatch.transforms.parameter_scale import factored_parameter_rms

RNG = np.random.default_rng(0)
VECTORS = [jnp.asarray(np.exp(RNG.normal(size=n)), "float32") for n in (4, 3, 5)]
PRODUCT = VECTORS[0][:, None, None] * VECTORS[1][None, :, None] * VECTORS[2][None, None, :]


def run(params, steps=1, **settings):
    transform = lb.scale_by_factored_parameter_rms(**settings)
    state = transform.init(params)
    for _ in range(steps):
        updates, state = transform.update(jnp.ones_like(params), state, params)
    (factors,) = state.factors
    return updates, factors


def test_finds_the_sizes_of_a_product():
    signs = jnp.asarray(RNG.choice([-1.0, 1.0], size=PRODUCT.shape), "float32")
    updates, factors = run(PRODUCT * signs)
    assert_allclose(updates, PRODUCT, rtol=1e-5)
    assert [factor.shape for factor in factors] == [(4, 1, 1), (1, 3, 1), (1, 1, 5)]


@pytest.mark.parametrize("shape", [(2,), (7,), (2, 2), (1, 3), (2, 1, 1)])
def test_slices_of_two_elements_or_fewer_have_the_size_of_the_block(shape):
    params = jnp.asarray(RNG.normal(size=shape), "float32")
    updates, _ = run(params)
    assert_allclose(updates, np.sqrt(np.mean(np.square(params))), rtol=1e-5)


def test_a_floor_under_parameters_of_zero():
    updates, _ = run(jnp.zeros((3, 4)), eps=0.25)
    assert_allclose(updates, 0.25, rtol=1e-6)


def test_blocks_of_one_element_pass():
    updates, factors = run(jnp.full((1, 1), 3.0))
    assert factors == ()
    assert_array_equal(updates, 1)


def test_one_axis_a_step_and_all_after_a_period(monkeypatch):
    monkeypatch.setattr(factored_parameter_rms, "REFIT_PERIOD", 5)
    transform = lb.scale_by_factored_parameter_rms()
    state = transform.init(PRODUCT)
    changed = []
    for step in range(7):
        params = jnp.roll(PRODUCT, 1, axis=step % 3) ** (1 + step)
        _, new = transform.update(params, state, params)
        columns = zip(new.factors[0], state.factors[0], strict=True)
        changed.append([bool(jnp.any(now != before)) for now, before in columns])
        state = new
    everything = [True, True, True]
    of_axis = np.eye(3, dtype=bool).tolist()
    assert changed == [everything, *(of_axis[t % 3] for t in range(1, 5)), everything, of_axis[0]]


@pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason="the text has the branches of other platforms too"
)
@pytest.mark.parametrize(("platform", "choices"), [("cpu", 2), ("cuda", 0), ("tpu", 0)])
def test_a_gpu_makes_no_choice_at_run_time(platform, choices):
    """It would wait for its host, once for each axis of each parameter."""
    transform = lb.scale_by_factored_parameter_rms()
    params = jnp.ones((3, 4))
    traced = jax.jit(transform.update).trace(params, transform.init(params), params)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    # Not a choice by the platform, which is a constant, but by a boolean, which is made a number.
    assert text.count("(tensor<i1>) -> tensor<i32>") == choices
