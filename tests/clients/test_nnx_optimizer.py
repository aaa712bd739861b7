"""Flax nnx: `nnx.Optimizer` holds the state, which is saved and read back with the model."""

from flax import nnx
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
    through_a_checkpoint,
)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.value = nnx.Linear(8, 1, rngs=rngs)  # a name that boxes use, too

    def __call__(self, x):
        return self.value(jnp.tanh(self.norm(self.hidden(x))))


@nnx.jit
def train_step(model, optimizer, x, y):
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
    before = jax.tree.map(jnp.asarray, nnx.state(model, nnx.Param))  # in boxes of their own
    optimizer.update(model, gradients)
    params = nnx.state(model, nnx.Param)
    updates = jax.tree.map(jnp.subtract, params, before)
    metrics = lb.step_metrics(optimizer.opt_state, params, gradients=gradients, updates=updates)
    return loss, metrics


def batch(number):
    x = jax.random.normal(jax.random.key(number), (16, 4))
    return x, jnp.sum(x, axis=1, keepdims=True)


def make(name):
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, accumulated(OPTIMIZERS[name]()), wrt=nnx.Param)


@pytest.mark.parametrize("name", NAMES)
def test_trains_saves_and_goes_on(name, tmp_path):
    def run(model, optimizer, numbers):
        return [train_step(model, optimizer, *batch(number)) for number in numbers]

    model, optimizer = make(name)
    first = run(model, optimizer, range(MICRO_BATCHES // 2))
    saved = through_a_checkpoint(tmp_path / "run", nnx.state((model, optimizer)))
    rest = run(model, optimizer, range(MICRO_BATCHES // 2, MICRO_BATCHES))
    losses, log = zip(*first, *rest, strict=True)
    assert_log(log, losses)

    resumed = make(name)
    nnx.update(resumed, saved)
    again = run(*resumed, range(MICRO_BATCHES // 2, MICRO_BATCHES))
    jax.tree.map(np.testing.assert_array_equal, again, rest)

    params = nnx.state(model, nnx.Param)
    ratios = lb.trust_ratios(optimizer.tx, optimizer.opt_state, params)
    names = {ratio.removeprefix("momentum_branch/") for ratio in ratios}
    assert names >= {"hidden/kernel", "norm/scale", "value/bias", "value/kernel"}
    assert isinstance(lb.diagnose(optimizer.tx, optimizer.opt_state, params), list)
