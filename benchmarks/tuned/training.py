"""A run: an optimizer trains a network through all the batches of a plan.

A CPU takes one run at a time, and gradients of a micro-batch. Others take runs with many settings
and seeds side by side, and a gradient over as much of a batch as every batch of the plan has.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.tuned.arms import Arm
from benchmarks.tuned.search import Settings
from benchmarks.tuned.task import Task
import optax_largebatch as lb
from optax_largebatch.plans.law import LAWS


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
    growth: jax.Array
    """The batch over the first one, if the momentum follows it; 1 otherwise."""


Run = Callable[[lb.BatchPlan, Sequence[tuple[Settings, int]]], Iterable[Losses]]
"""From settings and seeds to losses, in this order, as they are there."""

CHUNK = 2048  # plans of as many such chunks of steps, begun or full, share a program
SIDE_BY_SIDE = 512  # the examples of a gradient, but on a CPU
FLOOR = LAWS["muonh"].momentum_floor


@functools.cache
def steps_of(plan: lb.BatchPlan, momentum_moves: bool = False) -> Steps:
    """The steps of a plan."""
    chunks = -(-plan.total_steps // CHUNK)
    steps = range(chunks * CHUNK)
    batch_size = jnp.asarray([plan.batch_size(step) for step in steps])
    return Steps(
        jnp.asarray([plan.examples_at(step) for step in steps]),
        batch_size,
        jax.vmap(plan.learning_rate)(jnp.asarray(steps)),
        jax.vmap(plan.weight_decay)(jnp.asarray(steps)),
        batch_size / batch_size[0] if momentum_moves else jnp.ones(len(steps)),
    )


def mean_gradient(
    task: Task, params: Any, key: Any, start: Any, batch_size: Any, together: int
) -> Any:
    """The gradient of a batch: the mean over its parts, of so many micro-batches each."""
    part = together * task.micro_batch

    def add(index: jax.Array, total: Any) -> Any:
        starts = start + index * part + task.micro_batch * jnp.arange(together)
        examples = jax.vmap(lambda own: task.examples(key, own))(starts)
        examples = jax.tree.map(lambda x: x.reshape(part, *x.shape[2:]), examples)
        return jax.tree.map(jnp.add, total, jax.grad(task.loss)(params, examples))

    number = batch_size // part
    total = jax.lax.fori_loop(0, number, add, jax.tree.map(jnp.zeros_like, params))
    return jax.tree.map(lambda leaf: leaf / number, total)


@functools.cache
def compiled(task: Task, arm: Arm, side_by_side: int, momentum_moves: bool = False) -> Run:
    """Compiles the runs of an optimizer: all plans, settings and seeds in a few programs.

    A seed draws the same parameters and the same examples for every optimizer, in an order that
    does not depend on the batch size.

    Args:
        task: the network.
        arm: the optimizer.
        side_by_side: the runs that a device takes at once, but on a CPU.
        momentum_moves: whether the momentum follows a batch that grows.
    """
    on_cpu = jax.default_backend() == "cpu"
    lanes = 1 if on_cpu else side_by_side

    def train(
        steps: Any, table: Steps, together: int, settings: Settings, key: Any
    ) -> tuple[jax.Array, jax.Array]:
        def momentum(step: jax.Array) -> jax.Array:
            moved = 1 - (1 - settings.momentum) * table.growth[step]
            return jnp.maximum(moved, jnp.minimum(settings.momentum, FLOOR))

        transformation = arm.build(
            lambda step: settings.learning_rate * table.learning_rate[step],
            lambda step: settings.weight_decay * table.weight_decay[step],
            momentum if momentum_moves else settings.momentum,
            task.stacked,
        )
        for_params, for_examples = jax.random.split(key)

        def train_step(step: jax.Array, carry: Any) -> Any:
            params, state = carry
            start, batch_size = table.start[step], table.batch_size[step]
            gradient = mean_gradient(task, params, for_examples, start, batch_size, together)
            updates, state = transformation.update(gradient, state, params)
            return optax.apply_updates(params, updates), state

        params = task.init(for_params)
        carry = (params, transformation.init(params))
        params, _ = jax.lax.fori_loop(0, steps, train_step, carry)
        return task.loss(params, task.validation), task.loss(params, task.test)

    @functools.partial(jax.jit, static_argnums=2)
    def train_all(steps: Any, table: Steps, together: int, settings: Settings, keys: Any) -> Any:
        return jax.vmap(functools.partial(train, steps, table, together))(settings, keys)

    def run(plan: lb.BatchPlan, jobs: Sequence[tuple[Settings, int]]) -> Iterator[Losses]:
        sizes = [stage.batch_size for stage in plan.stages]
        part = math.gcd(*sizes, task.micro_batch if on_cpu else SIDE_BY_SIDE)
        if part % task.micro_batch:
            raise ValueError(f"batch sizes must be multiples of {task.micro_batch}, got {sizes}.")
        for begin in range(0, len(jobs), lanes):
            own = jobs[begin : begin + lanes]
            filled = [*own, *own[:1] * (lanes - len(own))]
            settings = Settings(*map(jnp.asarray, zip(*(x for x, _ in filled), strict=True)))
            keys = jax.vmap(jax.random.key)(jnp.asarray([seed for _, seed in filled]))
            table = steps_of(plan, momentum_moves)
            found = train_all(plan.total_steps, table, part // task.micro_batch, settings, keys)
            for _, *pair in zip(own, *found, strict=False):
                yield Losses(*(float(f"{float(x):.6g}") for x in pair))

    return run
