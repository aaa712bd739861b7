"""A small language model, trained in bfloat16 on the text of Python's standard library."""

import jax
import jax.numpy as jnp
import optax
import pytest

from benchmarks.tuned.bert import Sizes
from benchmarks.tuned.causal import CausalModel
import optax_largebatch as lb

STEPS, BATCH = 300, 16
SIZES = Sizes(layers=2, width=64, heads=4, length=64, micro_batch=BATCH, stacked=False)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.usefixtures("standard_promotion"),
]


def final_loss(network, optimizer, dtype):
    """The loss after the training, on text that is the same for all, computed in float32."""

    @jax.jit
    def step(carry, number):
        params, state = carry
        tokens = network.examples(jax.random.key(1), BATCH * number)
        gradients = jax.grad(network.loss)(params, tokens)
        updates, state = optimizer.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), None

    params = optax.tree.cast(network.init(jax.random.key(0)), dtype)
    carry = params, optimizer.init(params)
    (params, _), _ = jax.lax.scan(step, carry, jnp.arange(STEPS))
    wide = optax.tree.cast(params, "float32")
    return float(network.loss(wide, network.test))


def test_masters_and_stochastic_rounding_keep_the_loss_of_float32():
    """A rate so small that bfloat16 alone loses most steps, as at the end of every training."""
    network = CausalModel(SIZES, held_out=64)
    optimizer = lb.lamb(optax.linear_schedule(2e-3, 0.0, STEPS), weight_decay=0.01)
    full = final_loss(network, optimizer, "float32")
    masters = final_loss(network, lb.master_weights(optimizer), "bfloat16")
    stochastic = final_loss(network, lb.stochastic_rounding(optimizer), "bfloat16")
    without = final_loss(network, optimizer, "bfloat16")
    print(f"{full:.4f}, {masters:.4f}, {stochastic:.4f}, {without:.4f}")
    assert abs(masters - full) < 0.02 * full
    assert abs(stochastic - full) < 0.02 * full
    assert without - full > 0.05 * full
