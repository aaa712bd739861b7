"""Plain JAX: parameters in tuples, a donated step on a mesh, and ZeRO stage 1 for the moments."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import pytest

import optax_largebatch as lb
from tests.clients.training import (
    NAMES,
    NEEDS_JAX_0_8,
    OPTIMIZERS,
    accumulated,
    assert_has_ratios,
    batch,
    step_of,
    through_a_checkpoint,
    trained,
)

WIDTHS = (4, 8, 8, 1)


def first_params():
    keys = jax.random.split(jax.random.key(0), len(WIDTHS))
    columns = zip(keys, WIDTHS, WIDTHS[1:], strict=False)
    return tuple((jax.random.normal(key, (i, o)) / i**0.5, jnp.zeros(o)) for key, i, o in columns)


def loss_of(params, x, y):
    *hidden, (last, offset) = params
    for kernel, bias in hidden:
        x = jnp.tanh(x @ kernel + bias[None])
    return jnp.mean((x @ last + offset[None] - y) ** 2)


@NEEDS_JAX_0_8
@pytest.mark.parametrize("name", NAMES)
def test_trains_saves_and_goes_on(name, tmp_path):
    optimizer = accumulated(OPTIMIZERS[name]())
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    whole = NamedSharding(mesh, P())

    params = jax.device_put(first_params(), whole)
    places = lb.optimizer_state_shardings(optimizer, params, mesh, axis="data")
    split = [place.spec for place in jax.tree.leaves(places) if any(place.spec)]
    assert len(split) == (10 if name == "lars" else 15)  # of 8 elements or more, in each copy
    state = jax.jit(optimizer.init, out_shardings=places)(params)
    step = jax.jit(
        step_of(optimizer, loss_of), donate_argnums=(0, 1), out_shardings=(whole, places, None)
    )
    params, state = trained(
        step,
        (params, state),
        functools.partial(through_a_checkpoint, tmp_path / "run"),
        lambda number: jax.device_put(batch(number), NamedSharding(mesh, P("data"))),
    )
    assert_has_ratios({"0/0", "0/1", "1/0", "1/1", "2/0", "2/1"}, optimizer, state, params)
