"""Which blocks are decayed, and by how much."""

import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import pytest

import optax_largebatch as lb

PARAMS = {
    "kernel": jnp.array([[3.0, 4.0], [0.06, 0.08]]),
    "at_the_target": jnp.array([0.5, -0.5]),
    "scalar": jnp.asarray(7.0),
}


def decayed(steps=1, **settings):
    """The fraction of each parameter that the last step takes away."""
    transform = lb.decay_to_target_rms(**({"weight_decay": 0.01, "target_rms": 0.5} | settings))
    state = transform.init(PARAMS)
    zeros = {name: jnp.zeros_like(leaf) for name, leaf in PARAMS.items()}
    for _ in range(steps):
        updates, state = transform.update(zeros, state, PARAMS)
    return {name: np.unique(-updates[name] / PARAMS[name]).round(6) for name in PARAMS}


def test_only_blocks_above_the_target():
    fractions = decayed()
    assert_allclose(fractions["kernel"], [0.01])
    assert_array_equal(fractions["at_the_target"], [0.0])
    assert_array_equal(fractions["scalar"], [0.0])


def test_a_mask_and_a_schedule():
    schedule = lb.values_schedule([0.01, 0.02, 0.03])
    assert decayed(3, weight_decay=schedule)["kernel"] == pytest.approx([0.03])
    assert decayed(weight_decay_mask=~lb.matching("kernel"))["kernel"] == [0.0]
