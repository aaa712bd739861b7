"""The averages of the estimator: what they are, and which steps leave them alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import pytest

import optax_largebatch as lb
from tests.helpers import first_step
from tests.transforms.noise.quadratic import examples, network


def test_averages_are_the_weighted_means_and_variances():
    """With the weights 1, decay, decay^2 and so on, back from the last step."""
    rng = np.random.default_rng(0)
    transform = lb.measure_noise_scale(0.7)
    state, seen, step = transform.init(jnp.zeros(2)), [], jax.jit(transform.update)
    for _ in range(5):
        own = jnp.asarray(rng.normal(size=(3, 2)), "float32")
        parts = lb.small_batches_of_examples(own, jnp.zeros(2), batch_size=2, mean=own.mean(0))
        _, state = step(own.mean(0), state, small_batches=parts)
        small, large = np.mean(np.sum(own**2, 1)), np.sum(own.mean(0) ** 2)
        # b = 2, B = 6, as the paper has it
        seen.append([(small - large) / (1 / 2 - 1 / 6), (6 * large - 2 * small) / (6 - 2)])
    weights = 0.7 ** np.arange(5)[::-1]
    mean = np.average(seen, axis=0, weights=weights)
    spread = np.cov(np.transpose(seen), ddof=0, aweights=weights)
    assert_allclose(np.stack([state.noise, state.signal], 1), [mean] * 2, rtol=1e-5)
    assert_allclose(state.noise_variance[-1], spread[0, 0], rtol=1e-4)
    assert_allclose(state.signal_variance[-1], spread[1, 1], rtol=1e-4)
    assert_allclose(state.covariance[-1], spread[0, 1], rtol=1e-4)
    assert_allclose(state.weight, weights.sum(), rtol=1e-6)
    assert_allclose(state.square_weight, np.sum(weights**2), rtol=1e-6)


def test_micro_batches_of_different_sizes_have_no_bias():
    """Parts of 1, 2 and 5 examples, and one of none; the noise of an example is 4, and 1 is G^2."""
    params = jnp.full(3, 3**-0.5)
    optimizer = lb.accumulate_gradients(lb.measure_noise_scale(0.999), every=4, small_batches=True)
    sizes = jnp.array([2.0, 0.0, 5.0, 1.0])

    def micro(state, given):
        key, size = given
        noise = 2 * 3**-0.5 * jax.random.normal(key, (3,)) / jnp.sqrt(size)
        # of no examples it is NaN
        return optimizer.update(params + noise, state, params, examples=size)[1], None

    def run(key):
        keys = jax.random.split(key, 4 * 100)
        return jax.lax.scan(micro, optimizer.init(params), (keys, jnp.tile(sizes, 100)))[0]

    state = jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(0), 100)).inner_state
    assert_allclose(state.noise.mean(0), 4, rtol=0.02)
    assert_allclose(state.signal.mean(0), 1, rtol=0.03)


def test_a_step_of_one_micro_batch_changes_no_estimate():
    """The schedule has macro-batches of two and of one; a flush makes another one of one."""
    every = lb.values_schedule([2, 1, 3])
    optimizer = lb.accumulate_gradients(lb.measure_noise_scale(), every=every, small_batches=True)
    params = jnp.ones(3)
    state, states, step = optimizer.init(params), [], jax.jit(optimizer.update)
    for index in range(4):
        gradient = jnp.arange(3.0) + index
        _, state = step(gradient, state, params, flush=index == 3)
        states.append(state)
    assert [int(state.macro_step) for state in states] == [0, 1, 2, 3]
    averages = [np.stack(state.inner_state[2:]) for state in states]
    assert not averages[0].any()
    assert averages[1].any()
    assert_array_equal(averages[1:], [averages[1]] * 3)
    assert np.isfinite(lb.noise_scale(state).noise_scale)


@pytest.mark.parametrize("where", ["the gradient", "its parts"])
def test_a_step_that_is_not_finite_changes_no_estimate(where):
    transform = lb.measure_noise_scale()
    own = jnp.array([[1.0, 2.0], [3.0, 1.0]])
    mean = own.mean(0)
    parts = lb.small_batches_of_examples(own, own[0], mean=mean)
    _, state = transform.update(mean, transform.init(own[0]), small_batches=parts)
    bad = own.at[0, 0].set(jnp.inf)
    own, mean = (own, bad.mean(0)) if where == "the gradient" else (bad, mean)
    parts = lb.small_batches_of_examples(own, own[0], mean=mean)
    updates, after = transform.update(mean, state, small_batches=parts)
    assert_array_equal(updates, mean)
    jax.tree.map(assert_array_equal, after, state)


@pytest.mark.parametrize("place", [0, 1])
def test_changes_no_number_of_the_optimizer_nor_its_place_one_of_its_own(place):
    params, gradients = network(), examples(jax.random.key(0), 2)
    mean = jax.tree.map(lambda x: x.mean(0), gradients)
    parts = lb.small_batches_of_examples(gradients, params, mean=mean)
    watch = lb.measure_noise_scale()
    links = [lb.lamb(0.1)]
    links.insert(place, watch)

    @functools.partial(jax.jit, static_argnums=0)
    def step(transform):
        return first_step(transform, mean, params, small_batches=parts)

    updates, states = step(lb.chain(*links))
    expected, state = step(lb.lamb(0.1))
    jax.tree.map(assert_array_equal, (updates, states[1 - place]), (expected, state))
    jax.tree.map(assert_array_equal, states[place], step(watch)[1])
