"""What the programs here have in common: optimizers, batches, steps, checkpoints and the log."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import optax_largebatch as lb

EVERY = 2
MICRO_BATCHES = 12
RATE = optax.linear_schedule(0.02, 0.0, MICRO_BATCHES)
KERNELS = lb.at_least_ndim(2)

OPTIMIZERS = {
    "lamb": lambda **settings: lb.lamb(RATE, trust_ratio_mask=KERNELS, **settings),
    "lans": lambda **settings: lb.lans(RATE, trust_ratio_mask=KERNELS, **settings),
    "lars": lambda **settings: lb.lars(
        RATE, trust_coefficient=1.0, trust_ratio_mask=KERNELS, **settings
    ),
}
"""Each takes a step for two micro-batches, once it is wrapped."""

NAMES = [pytest.param(name, marks=pytest.mark.slow) for name in OPTIMIZERS]

NEEDS_JAX_0_8 = pytest.mark.skipif(
    not hasattr(jax, "shard_map"), reason="Flax's scan, and Orbax on meshes, want jax 0.8"
)


def accumulated(optimizer):
    """A step for two micro-batches, none for one that is not finite."""
    return lb.accumulate_gradients(lb.skip_bad_steps(optimizer), every=EVERY)


def batch(number, *devices):
    """Examples whose answer is their sum: 16, or two for each device."""
    x = jax.random.normal(jax.random.key(number), (*devices, 2 if devices else 16, 4))
    return x, jnp.sum(x, axis=-1, keepdims=True)


def step_of(optimizer, loss_of):
    """A step on a batch: parameters, state, and the loss with the metrics."""

    def step(params, state, x, y):
        loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        metrics = lb.step_metrics(state, params, gradients=gradients, updates=updates)
        return params, state, (loss, metrics)

    return step


def step_of_train_state(state, x, y, axis_name=None):
    """The same of a `TrainState` of Flax, on every device along an axis if one is named."""

    def loss_of(params):
        return jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)

    both = jax.value_and_grad(loss_of)(state.params)
    loss, gradients = jax.lax.pmean(both, axis_name) if axis_name else both
    new = state.apply_gradients(grads=gradients)
    updates = jax.tree.map(jnp.subtract, new.params, state.params)
    metrics = lb.step_metrics(new.opt_state, new.params, gradients=gradients, updates=updates)
    return new, (loss, metrics)


def trained(step, start, read_back, batch=batch):
    """The carry in the end, of a run that goes on from a checkpoint as if it had not stopped.

    Args:
        step: takes the carry and a batch, and returns the carry and what is logged.
        start: the carry at first.
        read_back: writes a carry, and returns it as it is read again.
        batch: the batch of a number.
    """

    def run(carry, numbers):
        logged = []
        for number in numbers:
            *carry, line = step(*carry, *batch(number))
            logged.append(line)
        return tuple(carry), logged

    begun, goes_on = range(MICRO_BATCHES // 2), range(MICRO_BATCHES // 2, MICRO_BATCHES)
    carry, first = run(start, begun)
    saved = read_back(carry)
    carry, rest = run(carry, goes_on)
    losses, log = zip(*first, *rest, strict=True)
    assert_log(log, losses)
    _, again = run(saved, goes_on)
    jax.tree.map(np.testing.assert_array_equal, again, rest)
    return carry


def assert_has_ratios(names, optimizer, state, params):
    """There is a trust ratio of each of these parameters."""
    ratios = lb.trust_ratios(optimizer, state, params)
    assert names <= {ratio.removeprefix("momentum_branch/") for ratio in ratios}


def through_a_checkpoint(path, state):
    """The same state, written and read back into the shapes and places that it had."""
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path, target)


LOGGED = [
    "learning_rate",
    "gradient_norm",
    "update_norm",
    "param_norm",
    "trust_ratio/min",
    "trust_ratio/median",
    "trust_ratio/max",
    "skipped_steps",
    "micro_step",
    "macro_step",
]


def assert_log(log, losses):
    """The log of a run: one flat dictionary for each micro-batch, and a loss that falls."""
    assert [sorted(line) for line in log] == [sorted(LOGGED)] * MICRO_BATCHES
    values = {name: np.array([float(line[name]) for line in log]) for name in LOGGED}
    assert all(np.isfinite(column).all() for column in values.values())
    number = np.arange(1, MICRO_BATCHES + 1)
    np.testing.assert_array_equal(values["micro_step"], number % EVERY)
    np.testing.assert_array_equal(values["macro_step"], number // EVERY)
    steps = number // EVERY
    expected = np.where(steps > 0, [float(RATE(step - 1)) for step in steps], 0)
    np.testing.assert_allclose(values["learning_rate"], expected, rtol=1e-6)
    np.testing.assert_array_equal(values["update_norm"] > 0, number % EVERY == 0)
    assert values["skipped_steps"].max() == 0
    assert (values["trust_ratio/max"][1:] != 1).all()
    assert np.mean(losses[-2:]) < np.mean(losses[:2])
