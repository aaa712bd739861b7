"""What a change in the middle of a run costs: `python -m tests.migration.changes`.

Each cell of the table is a run of a small network that changes after some steps, beside one that
does not. It is *exact*, costs a *bump*, or is *refused*.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import optax

import optax_largebatch as lb

BEFORE, AFTER = 20, 10
EXACT = {"float32": 1e-6, "float64": 1e-12}
"""The largest difference after the change, relative to the largest number of the parameter."""
WIDTH, HEADS, WORDS = 16, 4, 24
RATE = 0.01


def start(dtype="float32"):
    """A small network: a table, two layers and a head."""
    rng = np.random.default_rng(0)
    shapes = {
        "embed": (WORDS, WIDTH),
        "layer0": {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "scale": (WIDTH,)},
        "layer1": {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "scale": (WIDTH,)},
        "head": (WIDTH, WORDS),
    }
    is_shape = lambda x: isinstance(x, tuple)
    draw = lambda shape: jnp.asarray(rng.normal(size=shape) * WIDTH**-0.5, dtype)
    params = jax.tree.map(draw, shapes, is_leaf=is_shape)
    return params | {
        name: params[name] | {"scale": jnp.ones(WIDTH, dtype)} for name in ("layer0", "layer1")
    }
