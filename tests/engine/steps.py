"""Steps as they are compiled, for devices that this machine may not have."""

import jax
import optax
import pytest

from optax_largebatch.engine import step
from tests.conftest import as_users_have_it

several_devices = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
on_shards = pytest.mark.skipif(
    jax.device_count() < 8 or not hasattr(jax, "shard_map"),
    reason="needs eight devices, and jax.shard_map",
)
since_types_know_meshes = pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason="before, types do not say what devices a mesh has"
)


def use_plan(monkeypatch, plan):
    """Every step that is on no mesh runs by this plan."""
    monkeypatch.setattr(step, "ON_ONE_DEVICE", {"here": plan})
    monkeypatch.setattr(
        step, "dispatch_by_platform", lambda lowerings, types, *flat: lowerings("here")(*flat)
    )


def lowered(optimizer, params, *platforms):
    """The text of the update for each platform, from one trace."""
    state = jax.eval_shape(optimizer.init, params)
    traced = jax.jit(optimizer.update).trace(params, state, params)
    return [traced.lower(lowering_platforms=(x,)).as_text() for x in platforms]


def step_of(optimizer):
    """A step that updates the parameters."""

    def step(params, state, gradients):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return step


def compiled_step(optimizer, params):
    """The step, compiled as users have it; it may write over parameters and state."""
    state = jax.eval_shape(optimizer.init, params)
    step = jax.jit(step_of(optimizer), donate_argnums=(0, 1))
    return step.lower(params, state, params).compile(as_users_have_it)


def some_steps(optimizer, update, params, gradients_at, count):
    """The updates and the state of each step."""
    step, state = jax.jit(lambda *args: update(*args)), optimizer.init(params)
    for index in range(count):
        updates, state = step(gradients_at(index), state, params)
        yield updates, state


def large_kernels(number, sharding=None):
    return {
        f"kernel_{index}": jax.ShapeDtypeStruct((2048, 2048), "float32", sharding=sharding)
        for index in range(number)
    }
