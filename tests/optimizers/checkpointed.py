"""Every optimizer whose state is saved: those of the registry, and the wrappers around one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_largebatch as lb
from tests.helpers import compiled
from tests.optimizers.registry import OPTIMIZERS


def mixed_precision():
    """What float16 needs, on macro-batches of three."""
    accumulated = lb.accumulate_gradients(OPTIMIZERS["lamb"].make(), every=3)
    return lb.master_weights(lb.dynamic_loss_scale(accumulated, growth_interval=5))


def watched(inner):
    """With the noise scale of macro-batches of two."""
    watch = lb.chain(lb.measure_noise_scale(), inner)
    return lb.accumulate_gradients(watch, every=2, small_batches=True)


CHECKPOINTED = {
    **{name: entry.make for name, entry in OPTIMIZERS.items()},
    "mixed precision": mixed_precision,
    "stochastic rounding": lambda: lb.stochastic_rounding(OPTIMIZERS["lamb"].make()),
    "noise scale": lambda: watched(OPTIMIZERS["lamb"].make()),
    "skip_bad_steps": lambda: lb.skip_bad_steps(OPTIMIZERS["lars"].make()),
}


def parameters():
    """Three leaves, one of them of low precision, which eight devices can share."""
    rng = np.random.default_rng(0)
    return {
        "bias": jnp.asarray(rng.normal(size=8), "bfloat16"),
        "gain": jnp.asarray(rng.normal(), "float32"),
        "kernel": jnp.asarray(rng.normal(size=(8, 3)), "float32"),
    }


@functools.cache
def step_of(optimizer):
    """A compiled step."""

    def step(params, state, number):
        gradients = jax.tree.map(lambda x: jnp.cos(x * number.astype(x.dtype)), params)
        updates, state = optimizer.update(gradients, state, params)
        with jax.numpy_dtype_promotion("standard"):
            return optax.apply_updates(params, updates), state

    return compiled(step)


def trained(optimizer, params, state, steps):
    """Parameters and state after some steps, one for each number in `steps`."""
    for number in steps:
        params, state = step_of(optimizer)(params, state, jnp.float32(number))
    return params, state
