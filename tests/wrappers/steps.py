"""A small network, steps with given gradients, and the same on eight devices."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from tests.helpers import mesh_of

PARAMS = {"bias": jnp.ones(3), "kernel": jnp.ones((8, 2))}
SPECS = {"bias": P(), "kernel": P("fsdp")}
EIGHT_DEVICES = pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="jax.shard_map is jax 0.7")


def gradient(value):
    """A gradient of equal numbers; if they are not finite, a single one of ones."""
    if np.isfinite(value):
        return jax.tree.map(lambda x: jnp.full_like(x, value), PARAMS)
    return PARAMS | {"bias": jnp.array([1.0, value, 1.0])}


def in_one_shard(value):
    """A gradient of ones but for one element, which one of eight devices has."""
    return PARAMS | {"kernel": PARAMS["kernel"].at[5, 0].set(value)}


def steps(optimizer, gradients, extra_args=None, params=PARAMS):
    """The parameters and states after each of some steps."""
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for index, own in enumerate(gradients):
        updates, state = update(own, state, params, **(extra_args[index] if extra_args else {}))
        params = optax.apply_updates(params, updates)
        yield params, state


def in_shards(function, in_specs, out_specs, check_vma=True):
    """The function on eight devices, inside `jax.shard_map`."""
    mesh = mesh_of(fsdp=8)
    specs = {"in_specs": in_specs, "out_specs": out_specs}
    return jax.jit(jax.shard_map(function, mesh=mesh, check_vma=check_vma, **specs))


def on_eight_devices(optimizer, gradients, check_vma):
    """The parameters and the state's numbers after some steps inside `jax.shard_map`."""
    partition_specs = None if check_vma else SPECS

    def run(params, gradients):
        state = optimizer.init(params)
        for own in gradients:
            updates, state = optimizer.update(own, state, params, partition_specs=partition_specs)
            params = optax.apply_updates(params, updates)
        return params, state._replace(inner_state=())

    in_specs = (SPECS, [SPECS] * len(gradients))
    return in_shards(run, in_specs, (SPECS, P()), check_vma)(PARAMS, gradients)
