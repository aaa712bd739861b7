"""What a norm or a moment would lose in the dtype of its parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.helpers import first_step
from tests.optimizers.registry import OPTIMIZERS

MAGNITUDES = {"overflows": 1.0, "underflows": 1e-4}
"""In float16 the squares of the first add up to infinity, and those of the second are all 0."""
PRECISIONS = ("float16", "bfloat16")


def leaves(along, size=512):
    """A square matrix of every magnitude and precision, whose elements vary along one axis.

    Of 256 rows the sums would not be far above what float16 holds; products of 1,024 take long.
    """
    varying = np.expand_dims(1 + 0.25 * np.cos(np.arange(size)), 1 - along)
    return {
        dtype: {
            name: jnp.asarray(about * np.broadcast_to(varying, (size, size)), dtype)
            for name, about in MAGNITUDES.items()
        }
        for dtype in PRECISIONS
    }


def second_updates(optimizer, params, gradients):
    """The updates of a second step with the same gradients."""

    def run(params, gradients):
        _, state = first_step(optimizer, gradients, params)
        return optimizer.update(gradients, state, params)[0]

    return jax.jit(run)(params, gradients)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_low_precision_leaves_get_the_float32_answer(name):
    """The rate is such that no update is 0 in float16."""
    entry = OPTIMIZERS[name]
    optimizer = entry.make(learning_rate=1.0, **entry.known(ns_steps=1))
    low = leaves(along=0), leaves(along=1)
    ours = second_updates(optimizer, *low)
    exact = second_updates(optimizer, *optax.tree.cast(low, "float32"))
    expected = jax.tree.map(lambda x, like: x.astype(like.dtype), exact, ours)

    def close(one, other):
        """Once that is rounded, too, which few elements can be in another way."""
        one, other = np.asarray(one, "float64"), np.asarray(other, "float64")
        return np.linalg.norm(other) > 0 and (
            np.linalg.norm(one - other) <= 1e-3 * np.linalg.norm(other)
        )

    agree = jax.tree.map(close, ours, expected)
    assert all(jax.tree.leaves(agree)), agree
