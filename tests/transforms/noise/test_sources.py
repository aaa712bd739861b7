"""The noise scale from micro-batches and examples, where it is known."""

import functools

import jax
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import pytest

import optax_largebatch as lb
from tests.transforms.noise.quadratic import (
    NOISE,
    PARTS,
    SIZE,
    STACKED,
    examples,
    loss,
    mean_loss,
    network,
    spread,
    truth,
)

STEPS = 200


def final(step, state):
    """The state after all steps, each with its batch of examples."""

    def body(state, key):
        return step(state, examples(key, PARTS * SIZE)), None

    return jax.lax.scan(body, state, jax.random.split(jax.random.key(1), STEPS))[0]


def from_micro_batches():
    params, watch = network(), lb.measure_noise_scale(stacked=STACKED)
    optimizer = lb.accumulate_gradients(watch, every=PARTS, small_batches=True, stacked=STACKED)

    def step(state, batch):
        def micro(state, part):
            gradients = jax.grad(mean_loss)(params, part)
            return optimizer.update(gradients, state, params, examples=SIZE)[1], None

        parts = jax.tree.map(lambda x: x.reshape(PARTS, SIZE, *x.shape[1:]), batch)
        return jax.lax.scan(micro, state, parts)[0]

    return jax.jit(lambda state: final(step, state))(optimizer.init(params))


@functools.cache
def from_examples(stacked=STACKED):
    params, optimizer = network(), lb.measure_noise_scale(stacked=stacked)

    def step(state, batch):
        gradients = jax.vmap(jax.grad(loss), in_axes=(None, 0))(params, batch)
        mean = jax.tree.map(lambda x: x.mean(0), gradients)
        parts = lb.small_batches_of_examples(gradients, params, mean=mean, stacked=stacked)
        return optimizer.update(mean, state, params, small_batches=parts)[1]

    return jax.jit(lambda state: final(step, state))(optimizer.init(params))


@pytest.mark.parametrize("source", [from_micro_batches, from_examples])
def test_is_within_a_tenth_of_the_truth_after_200_steps(source):
    params, state = network(), source()
    whole = lb.noise_scale(state)
    assert_allclose(whole.noise_scale, truth(), rtol=0.1)
    squares = [np.sum(np.square(spread(name))) for name in NOISE]
    assert_allclose(whole.noise, sum(squares), rtol=0.1)
    assert whole.low < truth() < whole.high
    assert whole.high / whole.low < 1.25
    layers = lb.layer_noise_scales(state, params, stacked=STACKED)
    for name in ("bias", "kernel"):
        assert_allclose(layers[name].noise_scale, truth([name]), rtol=0.2)
    expected = [truth(["layers"], layer) for layer in range(4)]
    assert_allclose(layers["layers"].noise_scale, expected, rtol=0.2)


def test_layers_of_a_stack_have_the_numbers_of_layers_apart():
    params = network()
    layers = lb.layer_noise_scales(from_examples(), params, stacked=STACKED)
    whole = lb.layer_noise_scales(from_examples(None), params)
    for name in ("bias", "kernel"):
        assert_array_equal(layers[name], whole[name])
    # The noise of a stack is that of its layers together, and so is its gradient.
    for field in ("noise", "signal"):
        assert_allclose(
            getattr(layers["layers"], field).sum(), getattr(whole["layers"], field), rtol=1e-4
        )
    assert not np.isclose(layers["layers"].noise_scale[0], whole["layers"].noise_scale)
