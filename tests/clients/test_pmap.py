"""Flax linen under `jax.pmap`: replicated state, gradients averaged, checkpoints as bytes."""

import functools

from flax import jax_utils, linen, serialization
from flax.training.train_state import TrainState
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_largebatch as lb
from tests.clients.training import (
    NAMES,
    OPTIMIZERS,
    accumulated,
    assert_has_ratios,
    batch,
    step_of_train_state,
    trained,
)


class Net(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(1)(jnp.tanh(linen.Dense(8)(x)))


NET = Net()


def first_state(name):
    params = NET.init(jax.random.key(0), batch(0)[0])["params"]
    return TrainState.create(apply_fn=NET.apply, params=params, tx=accumulated(OPTIMIZERS[name]()))


@pytest.mark.parametrize("name", NAMES)
def test_trains_saves_and_goes_on(name, tmp_path):
    of_devices = functools.partial(step_of_train_state, axis_name="batch")
    of_devices = jax.pmap(of_devices, axis_name="batch", donate_argnums=0)

    def step(state, x, y):
        state, line = of_devices(state, x, y)
        return state, jax_utils.unreplicate(line)

    def read_back(carry):
        path = tmp_path / "checkpoint"
        path.write_bytes(serialization.to_bytes(jax_utils.unreplicate(carry[0])))
        saved = serialization.from_bytes(first_state(name), path.read_bytes())
        return (jax_utils.replicate(saved),)

    start = jax_utils.replicate(first_state(name))
    (state,) = trained(step, (start,), read_back, lambda number: batch(number, jax.device_count()))
    # The copies are alike, and one of them is read.
    jax.tree.map(lambda x: np.testing.assert_array_equal(*x[np.array([0, -1])]), state.params)
    own = jax_utils.unreplicate(state)
    assert_has_ratios({"Dense_0/kernel", "Dense_1/kernel"}, own.tx, own, own.params)
    with pytest.raises(ValueError, match="an axis for the copies"):
        lb.trust_ratios(own.tx, state, state.params)
