"""A loop written for `optax.MultiSteps`: it logs, saves and stops by `gradient_step`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_largebatch as lb
from tests.clients.training import (
    EVERY,
    MICRO_BATCHES,
    NAMES,
    OPTIMIZERS,
    accumulated,
    assert_log,
    through_a_checkpoint,
)

STEPS = MICRO_BATCHES // EVERY


def first_params():
    return {"hidden": jax.random.normal(jax.random.key(0), (4, 8)) / 2, "out": jnp.full((8,), 0.1)}


def batch(number):
    x = jax.random.normal(jax.random.key(number), (16, 4))
    return x, jnp.sum(x, axis=1)


def loss_of(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["hidden"]) @ params["out"] - y) ** 2)


def trained(optimizer, params, state, saved=lambda step, carry: None):
    """Up to the last step, from wherever the state stands; returns the log besides."""

    @jax.jit
    def micro_step(params, state, x, y):
        loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        metrics = lb.step_metrics(state, params, gradients=gradients, updates=updates)
        return params, state, (loss, metrics)

    log, evaluated = [], []
    while state.gradient_step < STEPS:
        number = int(state.gradient_step) * EVERY + int(state.mini_step)
        params, state, line = micro_step(params, state, *batch(number))
        log.append(line)
        if lb.has_updated(state):
            evaluated.append(float(loss_of(params, *batch(99))))
            saved(int(state.gradient_step), (params, state))
    return params, log, evaluated


@pytest.mark.parametrize("name", NAMES)
def test_trains_saves_and_goes_on(name, tmp_path):
    optimizer = accumulated(OPTIMIZERS[name]())
    checkpoints = {}

    def save(step, carry):
        checkpoints[step] = through_a_checkpoint(tmp_path / str(step), carry)

    params = first_params()
    end, log, evaluated = trained(optimizer, params, optimizer.init(params), save)
    metrics, losses = [line for _, line in log], [loss for loss, _ in log]
    assert_log(metrics, losses)
    assert len(evaluated) == STEPS
    assert sorted(checkpoints) == list(range(1, STEPS + 1))

    resumed, rest, _ = trained(optimizer, *checkpoints[STEPS // 2])
    jax.tree.map(np.testing.assert_array_equal, resumed, end)
    jax.tree.map(np.testing.assert_array_equal, rest, log[MICRO_BATCHES // 2 :])
    ratios = lb.trust_ratios(optimizer, checkpoints[1][1], params)
    names = {ratio.removeprefix("momentum_branch/") for ratio in ratios}
    assert names >= {"hidden"}
