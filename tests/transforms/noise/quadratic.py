"""A noisy quadratic, whose noise scale is known, and the runs that more than one test reads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_largebatch as lb
from tests.helpers import drawn

needs_shard_map = pytest.mark.skipif(
    not hasattr(jax.lax, "pcast"), reason="jax.lax.pcast, used inside jax.shard_map, is jax 0.8"
)

PARTS, SIZE = 8, 4
STACKED = lb.stacked_layers({"layers": 0})
NOISE = {"bias": [2.0], "kernel": [1.0], "layers": [0.5, 1.0, 2.0, 1.5]}
"""The standard deviation of the gradient of one example, of each layer."""


def network():
    return drawn({"bias": (5,), "kernel": (8, 4), "layers": (4, 8, 2)})


def truth(names=tuple(NOISE), layer=slice(None)):
    """The trace of the covariance over the squared norm of the gradient."""
    params = network()
    noise = sum(np.sum(np.square(spread(name))[layer]) for name in names)
    return noise / sum(np.sum(np.square(params[name][layer])) for name in names)


def spread(name):
    """The standard deviation of each element's gradient."""
    shape = network()[name].shape
    noise = np.reshape(np.asarray(NOISE[name], "float32"), (-1, *[1] * (len(shape) - 1)))
    return np.broadcast_to(noise, shape)


def loss(params, example):
    """A quadratic whose minimum is 0 on average, and elsewhere for every example."""
    return sum(jnp.sum(jnp.square(params[name] - example[name])) / 2 for name in params)


def mean_loss(params, examples):
    return jnp.mean(jax.vmap(loss, in_axes=(None, 0))(params, examples))


def examples(key, number):
    keys = dict(zip(NOISE, jax.random.split(key, len(NOISE)), strict=True))
    return {
        name: jax.random.normal(keys[name], (number, *leaf.shape)) * spread(name)[None]
        for name, leaf in network().items()
    }


def skewed(key, shape):
    """Exponentially distributed, shifted and scaled to mean 0 and variance 1."""
    return jax.random.exponential(key, shape) - 1


@functools.cache
def many_runs(steps, runs=400, decay=0.99, noise=4.0, draw=jax.random.normal):
    """Runs with a gradient of squared norm 1 and this noise of an example, in 3 numbers."""
    params = jnp.full(3, 3**-0.5)
    transform = lb.measure_noise_scale(decay)

    def step(state, key):
        own = params[None] + (noise / 3) ** 0.5 * draw(key, (4, 3))
        parts = lb.small_batches_of_examples(own, params, mean=own.mean(0))
        return transform.update(own.mean(0), state, small_batches=parts)[1], None

    def run(key):
        return jax.lax.scan(step, transform.init(params), jax.random.split(key, steps))[0]

    return jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(0), runs))
