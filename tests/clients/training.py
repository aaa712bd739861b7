"""What the programs here have in common: their optimizers, their checkpoints, their log."""

import jax
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
