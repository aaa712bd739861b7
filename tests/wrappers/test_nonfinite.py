"""Steps with a gradient that is not finite are left out, on all devices or on none."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import optax_largebatch as lb

PARAMS = {"bias": jnp.ones(3), "kernel": jnp.ones((8, 2))}


def steps(optimizer, gradients):
    """The parameters and states after each of some steps."""
    params, state = PARAMS, optimizer.init(PARAMS)
    for gradient in gradients:
        updates, state = jax.jit(optimizer.update)(gradient, state, params)
        params = optax.apply_updates(params, updates)
        yield params, state


def gradient(value, bad=None):
    gradients = jax.tree.map(lambda x: jnp.full_like(x, value), PARAMS)
    return gradients if bad is None else gradients | {"bias": jnp.array([value, bad, value])}


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_goes_on_as_if_the_step_had_not_been(bad):
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    with_faults = [gradient(1.0), gradient(2.0, bad), gradient(3.0, bad), gradient(0.5)]
    *_, (params, state) = steps(lb.skip_nonfinite(lb.lamb(schedule)), with_faults)
    *_, (expected, plain) = steps(lb.lamb(schedule), [gradient(1.0), gradient(0.5)])
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    jax.tree.map(np.testing.assert_array_equal, state.inner_state, plain)
    assert (int(state.skipped), int(state.skipped_in_a_row), bool(state.gave_up)) == (2, 0, False)


def test_says_when_there_are_too_many_in_a_row():
    good, bad = gradient(1.0), gradient(1.0, jnp.nan)
    run = [bad, good, bad, bad, good, bad]
    states = [state for _, state in steps(lb.skip_nonfinite(lb.lamb(0.1), max_in_a_row=2), run)]
    assert [int(state.skipped_in_a_row) for state in states] == [1, 0, 1, 2, 0, 1]
    assert [bool(state.gave_up) for state in states] == [False, False, False, True, True, True]
    assert int(states[-1].skipped) == 4


def test_passes_leaves_without_gradient():
    optimizer = lb.skip_nonfinite(lb.lamb(0.1))
    gradients = {"bias": None, "kernel": jnp.full((8, 2), jnp.nan)}
    updates, state = optimizer.update(gradients, optimizer.init(PARAMS), PARAMS)
    assert updates["bias"] is None
    np.testing.assert_array_equal(updates["kernel"], 0)
    assert int(state.skipped) == 1


@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="jax.shard_map is jax 0.7")
@pytest.mark.parametrize("check_vma", [True, False])
def test_all_devices_or_none(check_vma):
    """One infinity, in the shard of one of eight devices."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    specs = {"bias": P(), "kernel": P("fsdp")}
    optimizer = lb.skip_nonfinite(lb.lars(0.1, trust_coefficient=1.0))

    def step(params, gradients):
        updates, state = optimizer.update(
            gradients,
            optimizer.init(params),
            params,
            partition_specs=None if check_vma else specs,
        )
        return optax.apply_updates(params, updates), state.skipped[None]

    sharded = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(specs,) * 2, out_specs=(specs, P()), check_vma=check_vma
        )
    )
    fine = gradient(1.0)
    faulty = fine | {"kernel": fine["kernel"].at[5, 0].set(jnp.inf)}
    moved, skipped = sharded(PARAMS, fine)
    assert skipped == 0
    assert all(np.all(np.asarray(leaf) != 1) for leaf in moved.values())
    stayed, skipped = sharded(PARAMS, faulty)
    assert skipped == 1
    jax.tree.map(np.testing.assert_array_equal, stayed, PARAMS)


def test_bad_arguments():
    with pytest.raises(TypeError, match="inner must be a gradient transformation"):
        lb.skip_nonfinite(lb.lamb)
    with pytest.raises(ValueError, match="max_in_a_row must be"):
        lb.skip_nonfinite(lb.lamb(0.1), max_in_a_row=0)
