"""Runs that follow a plan: accumulated, resumed, and with a loader that grows the batch."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import optax
import pytest

import optax_largebatch as lb

MICRO = 4
RATE = lb.PlannedRate(0.05, total=96, warmup=8, decay="linear")
PLAN = lb.batch_plan(
    "0:4 12:8 40:16", total=96, micro_batch_size=MICRO,
    run=lb.TunedRun(
        "lamb", batch_size=4, total=96, learning_rate=RATE, weight_decay=0.1,
        decay_kind="decoupled",
    ),
)  # fmt: skip
EXAMPLES = np.random.default_rng(0).normal(size=(96 + 16, 3)).astype(np.float32)


def loss(params, batch):
    wrong = jnp.tanh(batch @ params["w"]) - batch[:, :1]
    return jnp.mean(jnp.square(wrong)) + jnp.sum(jnp.square(params["b"]))


def optimizer():
    inner = lb.lamb(PLAN.learning_rate, weight_decay=PLAN.weight_decay)
    return lb.accumulate_gradients(inner, every=PLAN.micro_batches)


def start():
    params = {"w": jnp.asarray(EXAMPLES[:3, :1]), "b": jnp.ones(1)}
    return params, optimizer().init(params)


@jax.jit
def step(params, state, batch):
    gradients = jax.grad(loss)(params, batch)
    updates, state = optimizer().update(gradients, state, params)
    return optax.apply_updates(params, updates), state


def micro_steps(carry, first, last):
    """The carry after each micro-batch."""
    for i in range(first, last):
        carry = step(*carry, jnp.asarray(EXAMPLES[MICRO * i : MICRO * (i + 1)]))
        yield carry


def test_the_steps_of_the_plan():
    """The optimizer steps where the plan says, and sees as many examples; nothing is recompiled."""
    before = step._cache_size()
    macro_steps = [int(state.macro_step) for _, state in micro_steps(start(), 0, 27)]
    ends = [PLAN.examples_at(t + 1) // MICRO - 1 for t in range(PLAN.total_steps)]
    assert PLAN.examples_at(PLAN.total_steps) == 108
    expected = [sum(end <= i for end in ends) for i in range(27)]
    assert macro_steps == expected
    assert [int(PLAN.batch_size(t)) for t in range(9)] == [4, 4, 4, 8, 8, 8, 8, 16, 16]
    assert step._cache_size() - before <= 1


def test_a_resumed_run_is_the_same_bit_for_bit():
    """Stopped at every micro-step around both edges, the second in the middle of a macro-batch."""
    *parts, whole = micro_steps(start(), 0, 20)
    for stopped, part in enumerate(parts, 1):
        read = jax.tree.map(jnp.asarray, pickle.loads(pickle.dumps(jax.device_get(part))))
        (*_, resumed) = micro_steps(read, stopped, 20)
        jax.tree.map(assert_array_equal, resumed, whole)


def test_the_rate_that_a_step_takes():
    """SGD of gradients of 1 moves by the planned rate, and LAMB counts the same steps."""
    sgd = lb.accumulate_gradients(optax.sgd(PLAN.learning_rate), every=PLAN.micro_batches)
    params = jnp.zeros(1)
    state = sgd.init(params)
    moved = []
    for _ in range(27):
        updates, state = sgd.update(jnp.ones(1), state, params)
        if lb.has_updated(state):
            moved.append(-float(updates[0]))
    assert_allclose(moved, PLAN.learning_rate(np.arange(PLAN.total_steps)), rtol=1e-6, atol=1e-8)
    # 12 examples at batch 4, then the root of 2, then 2.
    for t, root in ((2, 1), (3, 2**0.5), (7, 2)):
        assert moved[t] == pytest.approx(root * float(RATE(PLAN.examples_at(t))))
