"""Equinox under `filter_pmap`: arrays of a module trained, checkpoints as leaves."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_largebatch as lb
from tests.clients.training import MICRO_BATCHES, NAMES, OPTIMIZERS, accumulated, assert_log


def batch(number):
    """Two examples for each device."""
    x = jax.random.normal(jax.random.key(number), (jax.device_count(), 2, 4))
    return x, jnp.sum(x, axis=2)


def first(optimizer):
    """The network, which holds functions besides its arrays, and the state of the arrays."""
    net = eqx.nn.MLP(4, "scalar", 8, 1, jnp.tanh, key=jax.random.key(0))
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
    def step(net, state, x, y):
        def loss_of(net):
            return jnp.mean((jax.vmap(net)(x) - y) ** 2)

        loss, gradients = jax.lax.pmean(eqx.filter_value_and_grad(loss_of)(net), "batch")
        params = eqx.filter(net, eqx.is_inexact_array)
        updates, state = optimizer.update(gradients, state, params)
        net = eqx.apply_updates(net, updates)
        params = eqx.filter(net, eqx.is_inexact_array)
        metrics = lb.step_metrics(state, params, gradients=gradients, updates=updates)
        return net, state, (loss, metrics)

    def run(net, state, numbers):
        results = []
        for number in numbers:
            net, state, result = step(net, state, *batch(number))
            results.append(one_of(result))
        return net, state, results

    *halfway, begun = run(*replicated(first(optimizer)), range(MICRO_BATCHES // 2))
    path = tmp_path / "checkpoint.eqx"
    eqx.tree_serialise_leaves(path, one_of(tuple(halfway)))
    net, state, rest = run(*halfway, range(MICRO_BATCHES // 2, MICRO_BATCHES))
    losses, log = zip(*begun, *rest, strict=True)
    assert_log(log, losses)

    saved = eqx.tree_deserialise_leaves(path, first(optimizer))
    *_, again = run(*replicated(saved), range(MICRO_BATCHES // 2, MICRO_BATCHES))
    jax.tree.map(np.testing.assert_array_equal, again, rest)

    own = one_of((net, state))
    ratios = lb.trust_ratios(optimizer, own[1], eqx.filter(own[0], eqx.is_inexact_array))
    names = {ratio.removeprefix("momentum_branch/") for ratio in ratios}
    assert names >= {"layers/0/weight", "layers/1/weight"}
