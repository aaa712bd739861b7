"""Macro-batches."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_largebatch as lb

PARAMS = {"kernel": jnp.arange(1.0, 7.0).reshape(2, 3), "bias": jnp.ones(3)}


def micro_gradients(count, dtype="float32"):
    rng = np.random.default_rng(0)
    return [
        jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), dtype), PARAMS)
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    "inner", [lb.lamb(0.1), optax.sgd(0.1, momentum=0.9)], ids=["ours", "foreign"]
)
@pytest.mark.parametrize("every", [1, 3])
def test_equals_the_inner_optimizer_on_means(inner, every):
    optimizer = lb.accumulate_gradients(inner, every)
    state, params = optimizer.init(PARAMS), PARAMS
    inner_state, expected = inner.init(PARAMS), PARAMS
    gradients = micro_gradients(3 * every)
    for index, gradient in enumerate(gradients):
        before = params
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        if (index + 1) % every:
            chex.assert_trees_all_equal(params, before)
            assert state.micro_step == (index + 1) % every
            continue
        batch = gradients[index + 1 - every : index + 1]
        mean = jax.tree.map(lambda *parts: sum(parts) / every, *batch)
        updates, inner_state = inner.update(mean, inner_state, expected)
        expected = optax.apply_updates(expected, updates)
        chex.assert_trees_all_close(params, expected, rtol=1e-5)
        assert state.micro_step == 0
        assert state.macro_step == (index + 1) // every


def test_inner_is_not_computed_between_macro_batches():
    calls = []

    def update(updates, state, params=None):
        jax.debug.callback(lambda: calls.append(1))
        return updates, state

    inner = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    optimizer = lb.accumulate_gradients(inner, 4)
    state = optimizer.init(PARAMS)
    step = jax.jit(optimizer.update)
    for gradient in micro_gradients(8):
        _, state = step(gradient, state, PARAMS)
    jax.effects_barrier()
    assert len(calls) == 2


def test_sums_in_float32():
    """256 + 1 is 256 in bfloat16."""
    optimizer = lb.accumulate_gradients(optax.scale(1.0), 4)
    params = jnp.zeros(1, "bfloat16")
    state = optimizer.init(params)
    assert state.accumulator.dtype == jnp.float32
    for value in (256.0, 1.0, 1.0, 2.0):
        updates, state = optimizer.update(jnp.full(1, value, "bfloat16"), state, params)
    np.testing.assert_array_equal(np.asarray(updates, "float32"), [65.0])


def test_schedules_count_macro_batches():
    rate = lb.values_schedule([1.0, 10.0])
    optimizer = lb.accumulate_gradients(lb.scale_by_learning_rate(rate), 2)
    state = optimizer.init(jnp.zeros(1))
    seen = []
    for _ in range(4):
        updates, state = optimizer.update(jnp.ones(1), state)
        seen.append(float(updates[0]))
    assert seen == [0.0, -1.0, 0.0, -10.0]


def test_nan_stays_in_its_macro_batch():
    """The original poisons the weights at once: it multiplies the NaN by a rate of 0."""
    optimizer = lb.lbsgd(0.1, batch_scale=2)
    params = jnp.ones(1)
    state = optimizer.init(params)
    updates, state = optimizer.update(jnp.array([jnp.nan]), state, params)
    np.testing.assert_array_equal(updates, [0.0])


def test_a_reused_gradient_buffer_does_not_corrupt_the_sum():
    optimizer = lb.lbsgd(1.0, batch_scale=2, warmup_epochs=0, updates_per_epoch=1)
    params = jnp.ones(1)
    state = optimizer.init(params)
    buffer = np.array([1.0], "float32")
    _, state = optimizer.update(jnp.array(buffer), state, params)
    buffer[0] = 3.0
    updates, _ = optimizer.update(jnp.array(buffer), state, params)
    np.testing.assert_allclose(updates, [-2.0 * 2.0])


def test_interrupted_macro_batch_resumes_from_its_state():
    optimizer = lb.lbsgd(0.1, 0.9, batch_scale=3)
    gradients = micro_gradients(7)

    def run(state, params, gradients):
        for gradient in gradients:
            updates, state = optimizer.update(gradient, state, params)
            params = optax.apply_updates(params, updates)
        return state, params

    expected = run(optimizer.init(PARAMS), PARAMS, gradients)
    half = run(optimizer.init(PARAMS), PARAMS, gradients[:4])
    restored = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), half)
    chex.assert_trees_all_equal(run(*restored, gradients[4:]), expected)


@pytest.mark.parametrize(
    ("macro", "batch", "workers", "scale"),
    [(1000, 64, 4, 4), (64, 64, 1, 1), (65, 64, 1, 2), (1, 64, 8, 1)],
)
def test_batch_scale(macro, batch, workers, scale):
    assert lb.batch_scale(macro, batch, workers) == scale
