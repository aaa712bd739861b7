"""The table of a batch plan, at most 80 columns wide."""

from collections.abc import Iterator
import itertools
import textwrap
from typing import Any

import jax.numpy as jnp
import numpy as np

from optax_largebatch.plans.counts import written

WIDTH = 80
HEAD = 2
"""The lines above the stages."""
SHOWN = 16
"""The most stages in a table; a longer plan shows its first and its last ones."""
LOOKED_AT = 1024
"""The steps at which the learning rate is computed, to find its peak and where it is 0."""


def table(plan: Any) -> str:
    """The stages of a plan, each with its numbers, and what the plan saves."""
    numbers = list(range(len(plan.stages)))
    left_out = len(numbers) - SHOWN
    if left_out > 1:
        numbers = [*numbers[: SHOWN // 2], *numbers[-SHOWN // 2 :]]
    columns = [[*head, *map(str, cells)] for head, cells in _columns(plan, numbers)]
    widths = [max(map(len, column)) for column in columns]
    lines = ["  ".join(map(str.rjust, row, widths)).rstrip() for row in zip(*columns, strict=True)]
    if left_out > 1:
        lines.insert(HEAD + SHOWN // 2, f"... {left_out} more stages ...")
    return "\n".join([*lines, *_summary(plan)])


def _columns(plan: Any, numbers: list[int]) -> Iterator[tuple[tuple[str, str], list[Any]]]:
    """The head of each column, in two lines, and its cells for some of the stages."""
    stages = [plan.stages[number] for number in numbers]
    ends = [stage.first_step for stage in plan.stages[1:]] + [plan.total_steps]
    yield ("from", "step"), [stage.first_step for stage in stages]
    yield ("batch", "size"), [stage.batch_size for stage in stages]
    if plan.micro_batch_size is not None:
        yield ("micro-", "batches"), [plan.micro_batches(stage.first_step) for stage in stages]
    unit = "examples" if plan.sequence_length is None else "tokens"
    seen = [stage.first_example * (plan.sequence_length or 1) for stage in stages]
    yield (unit, "seen"), list(map(written, seen))
    # The first and the last step of each stage, one after the other.
    edges = [(stage.first_step, ends[i] - 1) for stage, i in zip(stages, numbers, strict=True)]
    steps = jnp.asarray([*itertools.chain(*edges)], jnp.int32)
    for head, value, at in (
        ("learning rate", plan.rate, plan.learning_rate),
        ("weight decay", plan.decay, plan.weight_decay),
    ):
        if value is not None:
            both = np.asarray(at(steps), float).reshape(-1, 2).tolist()
            yield ("", head), [_between(*pair, constant=not callable(value)) for pair in both]


def _between(first: float, last: float, constant: bool) -> str:
    """The values at both ends of a stage, or the one that the whole stage has."""
    return f"{first:.3g}" if constant else f"{first:.3g} to {last:.3g}"


def _summary(plan: Any) -> Iterator[str]:
    seen = f"{written(plan.examples)} examples"
    if plan.sequence_length is not None:
        seen += f", {written(plan.examples * plan.sequence_length)} tokens"
    yield f"{plan.total_steps} steps for {seen}."
    first = plan.stages[0].batch_size
    constant = -(-plan.examples // first)
    if constant != plan.total_steps:
        share = plan.total_steps / constant
        yield f"A constant batch of {first} takes {constant} steps; the plan {share:.0%} of that."
    if callable(plan.rate):
        yield from _of_the_rate(plan)
    if plan.note:
        note = f"Stages: {plan.note}."
        yield from textwrap.wrap(note, WIDTH, break_long_words=False, break_on_hyphens=False)


def _of_the_rate(plan: Any) -> Iterator[str]:
    """The peak of the learning rate, and whether it is 0 for a part of the run."""
    edges = [stage.first_step for stage in plan.stages]
    even = np.linspace(0, plan.total_steps - 1, LOOKED_AT).astype(np.int32)
    steps = np.union1d(even, edges).astype(np.int32)
    rates = np.asarray(plan.learning_rate(jnp.asarray(steps)), float)
    peak = steps[np.argmax(rates)]
    yield f"The learning rate is at most {rates.max():.3g}, near step {peak}."
    moving = np.flatnonzero(rates)
    last = int(steps[moving[-1]]) if moving.size else 0
    if last < 0.98 * (plan.total_steps - 1) - 1:
        yield f"It is 0 from about step {last} on. Its schedule has to count examples, not steps."
