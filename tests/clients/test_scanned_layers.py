"""Flax linen with `nn.scan`: layers stacked along axis 1, and an embedding that is frozen."""

import functools

from flax import linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_largebatch as lb
from tests.clients.training import (
    NAMES,
    NEEDS_JAX_0_8,
    OPTIMIZERS,
    accumulated,
    batch,
    step_of,
    through_a_checkpoint,
    trained,
)

LAYERS, WIDTH = 3, 8
STACKED = lb.stacked_layers({"layers/": 1})


class Layer(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        return x + linen.Dense(WIDTH, use_bias=False)(jnp.tanh(x)), None


class Net(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Dense(WIDTH, name="embed")(x)
        layers = linen.scan(
            Layer,
            variable_axes={"params": 1},
            split_rngs={"params": True},
            length=LAYERS,
        )
        x, _ = layers(name="layers")(x, None)
        return linen.Dense(1, name="head")(x)


NET = Net()


def loss_of(params, x, y):
    return jnp.mean((NET.apply({"params": params}, x) - y) ** 2)


def optimizer_of(name):
    """The frozen part has no moments."""
    labels = {"embed": "frozen", "layers": "trained", "head": "trained"}
    transforms = {"trained": OPTIMIZERS[name](stacked=STACKED), "frozen": optax.set_to_zero()}
    return accumulated(optax.partition(transforms, labels))


@NEEDS_JAX_0_8
@pytest.mark.parametrize("name", NAMES)
def test_trains_saves_and_goes_on(name, tmp_path):
    optimizer = optimizer_of(name)
    start = NET.init(jax.random.key(0), batch(0)[0])["params"]
    params, state = trained(
        jax.jit(step_of(optimizer, loss_of)),
        (start, optimizer.init(start)),
        functools.partial(through_a_checkpoint, tmp_path / "run"),
    )
    jax.tree.map(np.testing.assert_array_equal, params["embed"], start["embed"])
    ratios = lb.trust_ratios(optimizer, state, params)
    layers, *_ = (ratio for key, ratio in ratios.items() if "layers" in key)
    assert layers.shape == (LAYERS,)
    assert len(set(layers.tolist())) == LAYERS
    assert not any("embed" in name for name in ratios)
