"""Matrices that are stored outputs first: known by the types of Equinox, guessed by names."""

import equinox
import jax
import jax.numpy as jnp
import pytest

import optax_largebatch as lb
from optax_largebatch.params.blocks import Block
from optax_largebatch.params.likely_matrices import turned_by_name

KEYS = jax.random.split(jax.random.key(0), 3)


class Network(equinox.Module):
    """Layers whose rows and columns the types tell."""

    first: equinox.nn.Conv2d
    depthwise: equinox.nn.Conv2d
    linear: equinox.nn.Linear

    def __init__(self):
        self.first = equinox.nn.Conv2d(3, 8, 3, key=KEYS[0])
        self.depthwise = equinox.nn.Conv2d(8, 8, 3, groups=8, key=KEYS[1])
        self.linear = equinox.nn.Linear(8, 16, key=KEYS[2])


def matrices(optimizer, params):
    return {
        x.name: dict(x.matrices) for x in lb.explain(optimizer, params).parameters if x.matrices
    }


@pytest.mark.parametrize("stacked", [False, True])
def test_layers_of_equinox(stacked):
    params = equinox.filter(Network(), equinox.is_inexact_array)
    several = 1
    if stacked:
        several, params = 4, jax.tree.map(lambda x: jnp.stack([x] * 4), params)
    optimizer = lb.muon(0.1, stacked={".": 0} if stacked else {})
    optimizer.init(params)
    assert matrices(optimizer, params) == {
        "first/weight": {(27, 8): several},
        "linear/weight": {(8, 16): several},
    }


def by_name(shapes):
    blocks = [Block.of(name, shape) for name, shape in shapes.items()]
    return [blocks[number].name for number in turned_by_name(blocks)]


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ({"a/kernel": (8, 16), "a/bias": (16,), "b/kernel": (16, 8), "b/bias": (8,)}, []),
        ({"a/kernel": (16, 8), "a/bias": (16,), "b/kernel": (8, 8)}, ["a/kernel", "b/kernel"]),
        ({"up/kernel": (16, 8), "down/kernel": (8, 16)}, ["up/kernel", "down/kernel"]),
        ({"up/kernel": (8, 16), "down/kernel": (16, 8)}, []),
        ({"a/weight": (8, 16)}, ["a/weight"]),
        ({"a/weight": (8, 16), "a/bias": (16,)}, []),
        ({"up/lora_a": (16, 2), "up/lora_b": (2, 8)}, []),
        ({"wte/weight": (90, 8), "b/w": (8, 16)}, []),
    ],
)
def test_names_and_biases(shapes, expected):
    assert by_name(shapes) == expected
