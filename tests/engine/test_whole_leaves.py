"""A program that is no elementwise one is given whole leaves, however they are split."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import optax
import pytest

import optax_largebatch as lb
from optax_largebatch.engine import (
    Counter,
    Layers,
    PerParameter,
    VectorOfBlocks,
    block_norms,
    declare,
    each_matrix,
    materialize,
    sums_over_devices,
    transformation,
)
from optax_largebatch.params.matrix_axes import matrices_of
from tests.engine.steps import on_shards
from tests.helpers import mesh_of, shardings_on

pytestmark = on_shards

STACKED = lb.stacked_layers({"layers": 0})
PARAMS = {"layers": jnp.sin(jnp.arange(8.0 * 16 * 8)).reshape(8, 16, 8), "bias": jnp.arange(8.0)}
GRADS = jax.tree.map(lambda x: jnp.cos(3 * x), PARAMS)


class State(NamedTuple):
    count: jax.Array
    mu: Any
    lengths: jax.Array


def whiten():
    """Products of whole matrices, a norm of each layer, a moment and a vector of blocks."""

    def leaf(update, at):
        mu = yield materialize(0.5 * at.state.mu + update)
        layers = Layers.of(update.shape, at.stacked)

        def direction(matrix):
            return matrix - jnp.mean(matrix) if matrix.ndim == 1 else matrix @ (matrix.T @ matrix)

        new = layers.back(layers.each(direction)(layers.first(mu)))
        (length,) = yield block_norms(new)
        return at.param + new / length, at.state._replace(mu=mu, lengths=length)

    return transformation(
        leaf,
        state=declare(State, count=Counter(), mu=PerParameter(), lengths=VectorOfBlocks()),
        stacked=STACKED,
        needs_params=True,
    )


SPECS = {
    "rows": {"layers": P(None, "data"), "bias": P("data")},
    "columns": {"layers": P(None, None, "data"), "bias": P()},
    "layers": {"layers": P("data"), "bias": P("data")},
}


def two_steps(optimizer, grads, params, state, **extra):
    for _ in range(2):
        updates, state = optimizer.update(grads, state, params, **extra)
        params = jax.tree.map(jnp.add, params, updates)
    return params, state


@pytest.fixture(scope="module")
def whitening():
    """An optimizer, its first state, and what one device makes of two steps."""
    optimizer = lb.chain(whiten(), lb.scale_by_trust_ratio(stacked=STACKED))
    state = optimizer.init(PARAMS)
    expected = jax.jit(lambda *own: two_steps(optimizer, *own))(GRADS, PARAMS, state)
    return optimizer, state, jax.device_get(expected)


@pytest.mark.parametrize("way", ["jit", "jit, specs", "shard_map", "explicit"])
@pytest.mark.parametrize("name", SPECS)
def test_the_numbers_of_one_device(name, way, whitening):
    optimizer, state, expected = whitening
    specs = SPECS[name]
    axis_type = AxisType.Explicit if way == "explicit" else AxisType.Auto
    mesh = mesh_of(axis_type, data=8)
    split = shardings_on(mesh, specs)
    grads, params = jax.device_put(GRADS, split), jax.device_put(PARAMS, split)
    moments = (State(P(), specs, P()), lb.states.ScaleByTrustRatioState(P()))
    told = {"shard_map": specs, "jit, specs": split}.get(way)

    def step(*own):
        return two_steps(optimizer, *own, partition_specs=told)

    if way == "shard_map":
        step = jax.shard_map(
            step, mesh=mesh, in_specs=(specs, specs, moments), out_specs=(specs, moments)
        )
    elif way == "explicit":
        state = jax.device_put(state, shardings_on(mesh, moments))
    own = jax.jit(step)(grads, params, state)
    chex.assert_trees_all_close(jax.device_get(own), expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("given", ["whole", "shards"])
def test_sums_of_terms_and_matrices(given):
    """A program that is given whole leaves has all terms itself, and whole matrices."""

    def cubed(matrix):
        return matrix @ matrix.T @ matrix

    def leaf(update, at):
        (total,) = yield sums_over_devices(jnp.sum(update, axis=-1, keepdims=True))
        cubes = yield each_matrix(cubed, update, at.choice)
        return cubes / total, at.state

    transform = transformation(
        leaf, choices=lambda leaves: matrices_of(None, STACKED, leaves, "cubes"), given=given
    )
    layers = {"layers": PARAMS["layers"]}
    specs = P(None, None, "data")
    step = jax.shard_map(
        lambda grads: transform.update(grads, optax.EmptyState(), partition_specs=specs)[0],
        mesh=mesh_of(data=8),
        in_specs=specs,
        out_specs=specs,
    )
    expected = jax.tree.map(lambda x: jax.vmap(cubed)(x) / x.sum(-1, keepdims=True), layers)
    chex.assert_trees_all_close(jax.jit(step)(layers), expected, rtol=1e-4)
