"""A loop written for `optax.MultiSteps`: it logs, saves and stops by `gradient_step`."""

import jax
import numpy as np
import pytest

import optax_largebatch as lb
from tests.clients.training import (
    EVERY,
    MICRO_BATCHES,
    NAMES,
    OPTIMIZERS,
    accumulated,
    assert_has_ratios,
    assert_log,
    batch,
    first_params,
    loss_of,
    step_of,
    through_a_checkpoint,
)

STEPS = MICRO_BATCHES // EVERY


def trained(optimizer, params, state, saved=lambda step, carry: None):
    """Up to the last step, from wherever the state stands; returns the log besides."""
    micro_step = jax.jit(step_of(optimizer, loss_of))
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
    assert_has_ratios({"hidden"}, optimizer, checkpoints[1][1], params)
