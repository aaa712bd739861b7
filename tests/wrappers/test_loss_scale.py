"""A loss scale that grows while gradients are finite and falls where they are not."""

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_array_equal
import optax
import pytest

import optax_largebatch as lb
from tests.helpers import first_step
from tests.wrappers.steps import (
    EIGHT_DEVICES,
    PARAMS,
    gradient,
    in_one_shard,
    on_eight_devices,
    steps,
)


def scaled(state, value, bad=None):
    """The gradients of a scaled loss."""
    scale = optax.tree.get(state, "loss_scale")
    gradients = jax.tree.map(lambda x: jnp.full_like(x, value) * scale, PARAMS)
    return gradients if bad is None else gradients | {"bias": jnp.full(3, bad)}


def run(optimizer, values):
    """Parameters and states after each of some steps; None is an overflow."""
    step = jax.jit(optimizer.update)
    params, state = PARAMS, optimizer.init(PARAMS)
    for value in values:
        gradients = scaled(state, 1.0, jnp.inf) if value is None else scaled(state, value)
        updates, state = step(gradients, state, params)
        params = optax.apply_updates(params, updates)
        yield params, state


def test_trains_as_without_a_scale_and_without_the_overflows():
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    optimizer = lb.dynamic_loss_scale(lb.lamb(schedule))
    *_, (params, state) = run(optimizer, [1.0, None, 3.0, None, None, 0.5])
    *_, (expected, plain) = steps(lb.lamb(schedule), map(gradient, (1.0, 3.0, 0.5)))
    jax.tree.map(assert_array_equal, params, expected)
    jax.tree.map(assert_array_equal, state.inner_state, plain)
    assert int(state.skipped) == 3
    assert float(state.loss_scale) == 2.0**13


def test_grows_after_good_steps_and_falls_with_bad_ones():
    optimizer = lb.dynamic_loss_scale(
        optax.sgd(0.1), initial_scale=8.0, growth_factor=4.0, growth_interval=3
    )
    values = [1.0, 1.0, None, 1.0, 1.0, 1.0, 1.0]
    states = [state for _, state in run(optimizer, values)]
    assert [float(state.loss_scale) for state in states] == [8, 8, 4, 4, 4, 16, 16]
    assert [int(state.good_steps) for state in states] == [1, 2, -1, 1, 2, 0, 1]


def test_stays_between_1_and_what_float32_holds():
    falling = lb.dynamic_loss_scale(optax.sgd(0.1), initial_scale=2.0)
    assert [float(state.loss_scale) for _, state in run(falling, [None] * 3)] == [1, 1, 1]
    rising = lb.dynamic_loss_scale(optax.sgd(0.1), initial_scale=2.0**126, growth_interval=1)
    scales = [float(state.loss_scale) for _, state in run(rising, [0.0] * 3)]
    assert scales == [2.0**127] * 3


def test_gradients_too_small_for_float16_are_not_lost():
    """2**-30 is 0 in float16; a link brings it up again."""
    params = jnp.ones(2, "float16")
    optimizer = lb.dynamic_loss_scale(optax.scale(2.0**20), initial_scale=2.0**16)
    updates, _ = first_step(optimizer, jnp.full(2, 2.0**-14, "float16"), params)
    assert_array_equal(updates, jnp.full(2, 2.0**-10, "float16"))


@EIGHT_DEVICES
@pytest.mark.parametrize("check_vma", [True, False])
def test_all_devices_or_none(check_vma):
    """One infinity, in the shard of one of eight devices."""
    optimizer = lb.dynamic_loss_scale(lb.lars(0.1, trust_coefficient=1.0), initial_scale=4.0)
    moved, state = on_eight_devices(optimizer, [PARAMS], check_vma)
    assert state.loss_scale == 4
    assert all(np.all(np.asarray(leaf) != 1) for leaf in moved.values())
    stayed, state = on_eight_devices(optimizer, [in_one_shard(jnp.inf)], check_vma)
    assert state.loss_scale == 2
    jax.tree.map(assert_array_equal, stayed, PARAMS)
