"""Flax nnx: `nnx.Optimizer` holds the state, which is saved and read back with the model."""

from flax import nnx
import jax
import jax.numpy as jnp
import pytest

import optax_largebatch as lb
from tests.clients.training import (
    NAMES,
    OPTIMIZERS,
    accumulated,
    assert_has_ratios,
    through_a_checkpoint,
    trained,
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


def step(model, optimizer, x, y):
    return model, optimizer, train_step(model, optimizer, x, y)


def make(name):
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, accumulated(OPTIMIZERS[name]()), wrt=nnx.Param)


@pytest.mark.parametrize("name", NAMES)
def test_trains_saves_and_goes_on(name, tmp_path):
    def read_back(carry):
        resumed = make(name)
        nnx.update(resumed, through_a_checkpoint(tmp_path / "run", nnx.state(carry)))
        return resumed

    model, optimizer = trained(step, make(name), read_back)
    params = nnx.state(model, nnx.Param)
    names = {"hidden/kernel", "norm/scale", "value/bias", "value/kernel"}
    assert_has_ratios(names, optimizer.tx, optimizer.opt_state, params)
    assert isinstance(lb.diagnose(optimizer.tx, optimizer.opt_state, params), list)
