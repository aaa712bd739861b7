"""Flax linen under `jax.pmap`: replicated state, gradients averaged, checkpoints as bytes."""

from flax import jax_utils, linen, serialization
from flax.training.train_state import TrainState
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_largebatch as lb
from tests.clients.training import (
    MICRO_BATCHES,
    NAMES,
    OPTIMIZERS,
    accumulated,
    assert_log,
)


class Net(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(1)(jnp.tanh(linen.Dense(8)(x)))


NET = Net()


def batch(number):
    """Two examples for each device."""
    x = jax.random.normal(jax.random.key(number), (jax.device_count(), 2, 4))
    return x, jnp.sum(x, axis=2, keepdims=True)


def first_state(name):
    params = NET.init(jax.random.key(0), batch(0)[0][0])["params"]
    return TrainState.create(apply_fn=NET.apply, params=params, tx=accumulated(OPTIMIZERS[name]()))


def train_step(state, x, y):
    def loss_of(params):
        return jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)

    loss, gradients = jax.lax.pmean(jax.value_and_grad(loss_of)(state.params), "batch")
    new = state.apply_gradients(grads=gradients)
    updates = jax.tree.map(jnp.subtract, new.params, state.params)
    metrics = lb.step_metrics(new.opt_state, new.params, gradients=gradients, updates=updates)
    return new, (loss, metrics)


@pytest.mark.parametrize("name", NAMES)
def test_trains_saves_and_goes_on(name, tmp_path):
    step = jax.pmap(train_step, axis_name="batch", donate_argnums=0)

    def run(state, numbers):
        results = []
        for number in numbers:
            state, result = step(state, *batch(number))
            results.append(jax_utils.unreplicate(result))
        return state, results

    state, first = run(jax_utils.replicate(first_state(name)), range(MICRO_BATCHES // 2))
    path = tmp_path / "checkpoint"
    path.write_bytes(serialization.to_bytes(jax_utils.unreplicate(state)))
    state, rest = run(state, range(MICRO_BATCHES // 2, MICRO_BATCHES))
    losses, log = zip(*first, *rest, strict=True)
    assert_log(log, losses)

    saved = serialization.from_bytes(first_state(name), path.read_bytes())
    _, again = run(jax_utils.replicate(saved), range(MICRO_BATCHES // 2, MICRO_BATCHES))
    jax.tree.map(np.testing.assert_array_equal, again, rest)

    # The copies are alike, and one of them is read.
    jax.tree.map(lambda x: np.testing.assert_array_equal(*x[np.array([0, -1])]), state.params)
    own = jax_utils.unreplicate(state)
    ratios = lb.trust_ratios(own.tx, own, own.params)
    names = {ratio.removeprefix("momentum_branch/") for ratio in ratios}
    assert names >= {"Dense_0/kernel", "Dense_1/kernel"}
    with pytest.raises(ValueError, match="an axis for the copies"):
        lb.trust_ratios(own.tx, state, state.params)
