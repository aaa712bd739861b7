"""Equinox under `filter_pmap`: arrays of a module trained, checkpoints as leaves."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import optax_largebatch as lb
from tests.clients.training import (
    NAMES,
    OPTIMIZERS,
    accumulated,
    assert_has_ratios,
    batch,
    trained,
)


def first(optimizer):
    """The network, which holds functions besides its arrays, and the state of the arrays."""
    net = eqx.nn.MLP(4, 1, 8, 1, jnp.tanh, key=jax.random.key(0))
    return net, optimizer.init(eqx.filter(net, eqx.is_inexact_array))


def replicated(tree):
    """A copy for each device, along a first axis."""

    def copies(x):
        return jnp.broadcast_to(x, (jax.device_count(), *x.shape)) if eqx.is_array(x) else x

    return jax.tree.map(copies, tree)


def one_of(tree):
    """The copy of the first device."""
    return jax.tree.map(lambda x: x[0] if eqx.is_array(x) else x, tree)


@pytest.mark.parametrize("name", NAMES)
def test_trains_saves_and_goes_on(name, tmp_path):
    optimizer = accumulated(OPTIMIZERS[name]())

    @eqx.filter_pmap(axis_name="batch")
    def of_devices(net, state, x, y):
        def loss_of(net):
            return jnp.mean((jax.vmap(net)(x) - y) ** 2)

        loss, gradients = jax.lax.pmean(eqx.filter_value_and_grad(loss_of)(net), "batch")
        params = eqx.filter(net, eqx.is_inexact_array)
        updates, state = optimizer.update(gradients, state, params)
        net = eqx.apply_updates(net, updates)
        params = eqx.filter(net, eqx.is_inexact_array)
        metrics = lb.step_metrics(state, params, gradients=gradients, updates=updates)
        return net, state, (loss, metrics)

    def step(net, state, x, y):
        net, state, line = of_devices(net, state, x, y)
        return net, state, one_of(line)

    def read_back(carry):
        path = tmp_path / "checkpoint.eqx"
        eqx.tree_serialise_leaves(path, one_of(carry))
        return replicated(eqx.tree_deserialise_leaves(path, first(optimizer)))

    start = replicated(first(optimizer))
    carry = trained(step, start, read_back, lambda number: batch(number, jax.device_count()))
    net, state = one_of(carry)
    params = eqx.filter(net, eqx.is_inexact_array)
    assert_has_ratios({"layers/0/weight", "layers/1/weight"}, optimizer, state, params)
