"""The first stage computes what follows from early numbers, and no more."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_largebatch.engine.stages import Stages


def ratio_times(shared, early, late):
    """A trust ratio and what is made of it."""
    param_norm, update_norm = early
    ratio = jnp.where(update_norm > 0, param_norm / jnp.where(update_norm > 0, update_norm, 1), 1)
    return {"update": -shared["rate"] * 2 * ratio * late, "ratio": ratio, "same": param_norm}


SHARED, EARLY, LATE = {"rate": jnp.asarray(0.1)}, [jnp.asarray(3.0), jnp.asarray(2.0)], jnp.ones(4)


def test_both_stages_are_the_function():
    stages = Stages(ratio_times, SHARED, EARLY, LATE)
    jax.tree.map(
        np.testing.assert_array_equal,
        stages.second(stages.first()),
        ratio_times(SHARED, EARLY, LATE),
    )


def test_the_second_stage_starts_from_what_the_first_gives():
    stages = Stages(ratio_times, SHARED, EARLY, LATE)
    between = [10 * x for x in stages.first()]
    assert between
    results = stages.second(between)
    expected = ratio_times(SHARED, EARLY, LATE)
    np.testing.assert_allclose(results["ratio"], 10 * expected["ratio"], rtol=1e-6)
    assert results["same"] == EARLY[0]


@pytest.mark.parametrize(
    "function",
    [
        lambda shared, early, late: shared * late,
        lambda shared, early, late: jnp.broadcast_to(early, late.shape) + late,
        lambda shared, early, late: early,
    ],
    ids=["shared alone", "as large as a leaf", "nothing to compute"],
)
def test_what_the_first_stage_leaves_alone(function):
    stages = Stages(function, jnp.asarray(2.0), jnp.asarray(3.0), LATE)
    assert not stages.first()
    expected = function(jnp.asarray(2.0), jnp.asarray(3.0), LATE)
    np.testing.assert_array_equal(stages.second([]), expected)


def test_numbers_of_several_blocks_are_early():
    def scaled(shared, early, late):
        return jnp.sqrt(early) * late

    stages = Stages(scaled, None, jnp.ones((4, 1)), jnp.ones((4, 8)))
    assert [x.shape for x in stages.first()] == [(4, 1)]
