"""Called as optax's optimizers are called, ours give their numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_largebatch as lb

SHAPES = {"kernel": (6, 5), "bias": (5,), "conv": (3, 3, 2, 4), "scale": (), "empty": (0, 3)}
STEPS = 50

PAIRS = {
    "lamb": (lb.lamb(1e-2), optax.lamb(1e-2)),
    "lamb, decayed": (
        lb.lamb(1e-2, 0.8, 0.99, 1e-5, 1e-7, 0.1, lb.at_least_ndim(2)),
        optax.lamb(
            1e-2, 0.8, 0.99, 1e-5, 1e-7, 0.1, lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
        ),
    ),
    "lars": (lb.lars(0.5, denominator="update"), optax.lars(0.5)),
    "lars, decayed": (
        lb.lars(0.5, 0.01, lb.at_least_ndim(2), 0.01, 1e-8, None, 0.8, True, denominator="update"),
        optax.lars(
            0.5, 0.01, lambda p: jax.tree.map(lambda x: x.ndim > 1, p), 0.01, 1e-8, True, 0.8, True
        ),
    ),
}


def trajectory(optimizer, dtype, strict):
    """All parameters after every step, flattened leaf by leaf."""
    rng = np.random.default_rng(0)
    start = {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in SHAPES.items()}
    start["bias"] = jnp.zeros_like(start["bias"])
    gradients = {
        name: jnp.asarray(rng.normal(size=(STEPS, *shape)), dtype) for name, shape in SHAPES.items()
    }

    def step(carry, gradient):
        params, state = carry
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    with jax.numpy_dtype_promotion("strict" if strict else "standard"):
        run = jax.jit(lambda carry, gradient: jax.lax.scan(step, carry, gradient)[1])
        return jax.tree.map(
            lambda x: np.asarray(x, "float64"), run((start, optimizer.init(start)), gradients)
        )


def largest_difference(ours, theirs):
    return max(
        float(np.abs(ours[name] - theirs[name]).max() / np.abs(theirs[name]).max())
        for name in SHAPES
        if ours[name].size
    )


@pytest.mark.parametrize("pair", PAIRS)
def test_float32(pair):
    ours, theirs = PAIRS[pair]
    difference = largest_difference(
        trajectory(ours, "float32", strict=True), trajectory(theirs, "float32", strict=False)
    )
    assert difference < 2e-5


@pytest.mark.parametrize("pair", PAIRS)
def test_float64(pair, x64):
    ours, theirs = PAIRS[pair]
    difference = largest_difference(
        trajectory(ours, "float64", strict=True), trajectory(theirs, "float64", strict=False)
    )
    assert difference < 1e-12


@pytest.mark.parametrize("pair", PAIRS)
def test_bfloat16(pair):
    """Equal to a few roundings: optax's moments are bfloat16 here and ours are float32.

    One rounding is 4e-3 of a value; a momentum buffer that starts at zero adds up ten of them.
    """
    ours, theirs = (
        trajectory(optimizer, "bfloat16", strict)
        for optimizer, strict in zip(PAIRS[pair], (True, False), strict=True)
    )
    assert largest_difference(ours, theirs) < 0.04


def test_bias_correction_of_small_steps_is_exact():
    """Adam's first direction is the gradient's sign: float32's 1 - .999 would be off by 2e-5."""
    transform = lb.scale_by_adam(b2=0.999999, eps=1e-30)
    updates, _ = transform.update(jnp.array([3.0]), transform.init(jnp.zeros(1)))
    np.testing.assert_allclose(updates, 1.0, rtol=1e-6)
