"""A run: an optimizer trains a network through all the batches of a plan."""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.tuned.arms import ARMS, Arm
from benchmarks.tuned.bert import Bert
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


def mean_gradient(task: Bert, params: Any, key: Any, start: Any, batch_size: Any) -> Any:
    """The gradient of a batch: the mean over its micro-batches."""

    def add(index: jax.Array, total: Any) -> Any:
        examples = task.examples(key, start + index * task.micro_batch)
        return jax.tree.map(jnp.add, total, jax.grad(task.loss)(params, examples))

    number = batch_size // task.micro_batch
    total = jax.lax.fori_loop(0, number, add, jax.tree.map(jnp.zeros_like, params))
    return jax.tree.map(lambda leaf: leaf / number, total)


def prepare(task: Bert, optimizer: str) -> Run:
    """Compiles the runs of an optimizer, by its name."""
    return compiled(task, ARMS[optimizer])


@functools.cache
def compiled(task: Bert, arm: Arm) -> Run:
    """Compiles the runs of an optimizer: all plans, settings and seeds in one program.

    A seed draws the same parameters and the same examples for every optimizer, in an order that
    does not depend on the batch size.
    """
    init, loss = jax.jit(task.init), jax.jit(task.loss)

    @jax.jit
    def train(params: Any, steps: Any, table: Steps, settings: Settings, key: Any) -> Any:
        transformation = arm.build(
            lambda step: settings.learning_rate * table.learning_rate[step],
            lambda step: settings.weight_decay * table.weight_decay[step],
            settings.momentum,
            task.stacked,
        )

        def train_step(step: jax.Array, carry: Any) -> Any:
            params, state = carry
            start, batch_size = table.start[step], table.batch_size[step]
            gradient = mean_gradient(task, params, key, start, batch_size)
            updates, state = transformation.update(gradient, state, params)
            return optax.apply_updates(params, updates), state

        carry = (params, transformation.init(params))
        return jax.lax.fori_loop(0, steps, train_step, carry)[0]

    def run(plan: lb.BatchPlan, settings: Settings, seed: int) -> Losses:
        for stage in plan.stages:
            if stage.batch_size % task.micro_batch:
                raise ValueError(
                    f"batch sizes must be multiples of {task.micro_batch}, got {stage.batch_size}."
                )
        for_params, for_examples = jax.random.split(jax.random.key(seed))
        params = train(init(for_params), plan.total_steps, steps_of(plan), settings, for_examples)
        losses = (loss(params, examples) for examples in (task.validation, task.test))
        return Losses(*(float(f"{float(x):.6g}") for x in losses))

    return run
