"""A run: an optimizer trains a network through all the batches of a plan."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.batch_size_curve.training import Task, check_batch_size, mean_gradient
from benchmarks.tuned.arms import ARMS
from benchmarks.tuned.search import Settings
import optax_largebatch as lb


class Losses(NamedTuple):
    """The losses at the end; not finite if the run has diverged."""

    validation: float
    """Chooses the settings."""
    test: float
    """Is reported, and never looked at before."""


Run = Callable[[Settings, int], Losses]


def prepare(task: Task, optimizer: str, plan: lb.BatchPlan) -> Run:
    """Compiles the runs of a cell: all settings and seeds in one program.

    A seed draws the same parameters and the same examples for every optimizer, in an order that
    does not depend on the batch size.
    """
    for stage in plan.stages:
        check_batch_size(task, stage.batch_size)
    steps = range(plan.total_steps)
    starts = jnp.asarray([plan.examples_at(step) for step in steps])
    batch_sizes = jnp.asarray([plan.batch_size(step) for step in steps])

    @jax.jit
    def train(rate: Any, decay: Any, momentum: Any, seed: Any) -> Any:
        for_params, for_stream = jax.random.split(jax.random.key(seed))
        params, stream = task.init(for_params), task.stream(for_stream)
        transformation = ARMS[optimizer].build(
            lambda step: rate * plan.learning_rate(step),
            lambda step: decay * plan.weight_decay(step),
            momentum,
            task.stacked,
        )

        def train_step(step: jax.Array, carry: Any) -> Any:
            params, state = carry
            gradient = mean_gradient(task, params, stream, starts[step], batch_sizes[step])
            updates, state = transformation.update(gradient, state, params)
            return optax.apply_updates(params, updates), state

        carry = (params, transformation.init(params))
        params, _ = jax.lax.fori_loop(0, len(steps), train_step, carry)
        return task.loss(params, task.validation), task.loss(params, task.test)

    def run(settings: Settings, seed: int) -> Losses:
        _, rate, decay, momentum = settings
        validation, test = train(rate, decay, momentum, seed)
        return Losses(*(float(f"{float(loss):.6g}") for loss in (validation, test)))

    return run
