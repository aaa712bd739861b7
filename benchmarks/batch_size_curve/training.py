"""A trial: an optimizer trains a network until the validation loss is at the target."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.batch_size_curve.optimizers import OPTIMIZERS, warmed_up
from benchmarks.batch_size_curve.search import Settings
import optax_largebatch as lb

RESOLUTION = 25  # from an evaluation to the next the steps grow by 1/25


class Outcome(NamedTuple):
    """The result of a trial."""

    steps: float
    """The steps to the target, or infinity."""
    ended: str
    """`reached`, `diverged`, `censored` (it could not beat another trial) or `out of steps`."""
    validation_loss: float
    test_loss: float


class Task(Protocol):
    """A task for a network. Losses are means over examples."""

    target: float
    """The validation loss to reach."""
    warmup_steps: int
    micro_batch: int
    """The size of a micro-batch; the gradient of a batch is the mean over its micro-batches."""
    validation: Any
    test: Any
    stacked: lb.Stacked | None
    """The layers that are in one array, if there are any."""

    def init(self, key: jax.Array) -> Any:
        """The parameters."""
        ...

    def limit(self, batch_size: int) -> int:
        """The steps after which a trial is given up."""
        ...

    def stream(self, key: jax.Array) -> Any:
        """The order of the training examples; it does not depend on the batch size."""
        ...

    def examples(self, stream: Any, start: jax.Array) -> Any:
        """The micro-batch that begins with training example number `start`."""
        ...

    def loss(self, params: Any, examples: Any) -> jax.Array:
        """The loss of the network."""
        ...


class Run(Protocol):
    """Runs the trials of an optimizer."""

    def __call__(
        self, settings: Settings, seed: int, batch_size: int, most_steps: float
    ) -> Outcome:
        """Runs a trial of no more than `most_steps`; it is called censored if it needs more."""
        ...


def evaluations(warmup_steps: int, most_steps: int) -> list[int]:
    """The steps after which the validation loss is taken, the same for every optimizer.

    The first is the end of the warm-up, and no two are further apart than 4% of the steps so far,
    or a single step.
    """
    steps = [warmup_steps]
    while steps[-1] <= most_steps:
        steps.append(steps[-1] + max(steps[-1] // RESOLUTION, 1))
    return steps[:-1]


def mean_gradient(task: Task, params: Any, stream: Any, start: Any, batch_size: Any) -> Any:
    """The gradient of a batch: the mean over its micro-batches."""

    def add(index: jax.Array, total: Any) -> Any:
        examples = task.examples(stream, start + index * task.micro_batch)
        return jax.tree.map(jnp.add, total, jax.grad(task.loss)(params, examples))

    parts = batch_size // task.micro_batch
    total = jax.lax.fori_loop(0, parts, add, jax.tree.map(jnp.zeros_like, params))
    return jax.tree.map(lambda leaf: leaf / parts, total)


def check_batch_size(task: Task, batch_size: int) -> None:
    """It has to be made of whole micro-batches."""
    if batch_size % task.micro_batch:
        raise ValueError(f"batch_size must be a multiple of {task.micro_batch}, got {batch_size}.")


def training_step(
    task: Task, transformation: optax.GradientTransformation, stream: Any, batch_size: Any
) -> Callable[[jax.Array, Any], Any]:
    """From the number of a step, parameters and state to those after it."""

    def train_step(step: jax.Array, carry: Any) -> Any:
        params, state = carry
        gradient = mean_gradient(task, params, stream, step * batch_size, batch_size)
        updates, state = transformation.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    return train_step


def prepare(task: Task, optimizer: str) -> Run:
    """Compiles the trials of an optimizer: all settings, seeds and batch sizes in one program."""

    @jax.jit
    def train(rate: Any, decay: Any, seed: Any, batch_size: Any, last: Any) -> Any:
        for_params, for_stream = jax.random.split(jax.random.key(seed))
        params = task.init(for_params)
        stream = task.stream(for_stream)
        schedule = warmed_up(rate, task.warmup_steps)
        transformation = OPTIMIZERS[optimizer].build(schedule, decay, task.stacked)
        train_step = training_step(task, transformation, stream, batch_size)

        def train_on(carry: Any) -> Any:
            step, _, params, state = carry
            after = step + jnp.where(
                step == 0, task.warmup_steps, jnp.maximum(step // RESOLUTION, 1)
            )
            params, state = jax.lax.fori_loop(step, after, train_step, (params, state))
            return after, task.loss(params, task.validation), params, state

        def goes_on(carry: Any) -> jax.Array:
            step, loss, *_ = carry
            return (loss > task.target) & jnp.isfinite(loss) & (step < last)

        start = (jnp.asarray(0), task.loss(params, task.validation), params)
        step, loss, params, _ = jax.lax.while_loop(
            goes_on, train_on, (*start, transformation.init(params))
        )
        return step, loss, task.loss(params, task.test)

    def run(settings: Settings, seed: int, batch_size: int, most_steps: float) -> Outcome:
        check_batch_size(task, batch_size)
        limit = task.limit(batch_size)
        last = evaluations(task.warmup_steps, min(most_steps, limit))[-1]
        rate, decay = settings.learning_rate, settings.weight_decay
        step, loss, test_loss = map(float, train(rate, decay, seed, batch_size, last))
        if not np.isfinite(loss):
            return Outcome(np.inf, "diverged", loss, test_loss)
        if loss <= task.target:
            return Outcome(step, "reached", loss, test_loss)
        ended = "censored" if most_steps < limit else "out of steps"
        return Outcome(np.inf, ended, loss, test_loss)

    return run
