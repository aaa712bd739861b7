"""Called as optax's optimizers are called, ours give their numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_largebatch as lb
from tests.conftest import enable_x64
from tests.helpers import drawn, first_step, trajectory
from tests.trajectories import assert_same

SHAPES = {"kernel": (6, 5), "bias": (5,), "conv": (3, 3, 2, 4), "scale": (), "empty": (0, 3)}

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


def parameters_of_every_step(optimizer, dtype, promotion):
    start = drawn(SHAPES, dtype)
    start["bias"] = jnp.zeros_like(start["bias"])
    gradients = drawn({name: (50, *shape) for name, shape in SHAPES.items()}, dtype, seed=1)
    with jax.numpy_dtype_promotion(promotion):
        steps = trajectory(optimizer, start, gradients)
    return jax.tree.map(lambda x: np.asarray(x, "float64"), steps)


LARGEST = {"float32": 2e-5, "float64": 1e-12, "bfloat16": 0.04}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("dtype", LARGEST)
def test_the_parameters_of_every_step(pair, dtype):
    """In bfloat16 to a few roundings: optax's moments are bfloat16 then and ours are float32.

    One rounding is 4e-3 of a value; a momentum buffer that starts at zero adds up ten of them.
    """
    ours, theirs = PAIRS[pair]
    with enable_x64(dtype == "float64"):
        found = parameters_of_every_step(ours, dtype, "strict")
        expected = parameters_of_every_step(theirs, dtype, "standard")
    assert_same(found, expected, LARGEST[dtype])


def test_bias_correction_of_small_steps_is_exact():
    """Adam's first direction is the gradient's sign: float32's 1 - .999 would be off by 2e-5."""
    transform = lb.scale_by_adam(b2=0.999999, eps=1e-30)
    updates, _ = first_step(transform, jnp.array([3.0]), jnp.zeros(1))
    np.testing.assert_allclose(updates, 1.0, rtol=1e-6)
