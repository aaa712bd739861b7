"""A run: an optimizer trains a network through all the batches of a plan."""

from collections.abc import Callable
import functools
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


class Steps(NamedTuple):
    """The steps of a plan; those behind the last are not taken."""

    start: jax.Array
    """The training examples before each step."""
    batch_size: jax.Array
    learning_rate: jax.Array
    weight_decay: jax.Array


Run = Callable[[lb.BatchPlan, Settings, int], Losses]
CHUNK = 2048  # plans of as many such chunks of steps, begun or full, share a program


@functools.cache
def steps_of(plan: lb.BatchPlan) -> Steps:
    """The steps of a plan."""
    chunks = -(-plan.total_steps // CHUNK)
    steps = range(chunks * CHUNK)
    return Steps(
        jnp.asarray([plan.examples_at(step) for step in steps]),
        jnp.asarray([plan.batch_size(step) for step in steps]),
        jax.vmap(plan.learning_rate)(jnp.asarray(steps)),
        jax.vmap(plan.weight_decay)(jnp.asarray(steps)),
    )


@functools.cache
def prepare(task: Task, optimizer: str) -> Run:
    """Compiles the runs of an optimizer: all plans, settings and seeds in one program.

    A seed draws the same parameters and the same examples for every optimizer, in an order that
    does not depend on the batch size.
    """
    init, loss = jax.jit(task.init), jax.jit(task.loss)

    @jax.jit
    def train(params: Any, steps: Any, table: Steps, settings: Settings, stream: Any) -> Any:
        transformation = ARMS[optimizer].build(
            lambda step: settings.learning_rate * table.learning_rate[step],
            lambda step: settings.weight_decay * table.weight_decay[step],
            settings.momentum,
            task.stacked,
        )

        def train_step(step: jax.Array, carry: Any) -> Any:
            params, state = carry
            batch = (stream, table.start[step], table.batch_size[step])
            gradient = mean_gradient(task, params, *batch)
            updates, state = transformation.update(gradient, state, params)
            return optax.apply_updates(params, updates), state

        carry = (params, transformation.init(params))
        return jax.lax.fori_loop(0, steps, train_step, carry)[0]

    def run(plan: lb.BatchPlan, settings: Settings, seed: int) -> Losses:
        for stage in plan.stages:
            check_batch_size(task, stage.batch_size)
        for_params, for_stream = jax.random.split(jax.random.key(seed))
        table, stream = steps_of(plan), task.stream(for_stream)
        params = train(init(for_params), plan.total_steps, table, settings, stream)
        held_out = (task.validation, task.test)
        return Losses(*(float(f"{float(loss(params, own)):.6g}") for own in held_out))

    return run
