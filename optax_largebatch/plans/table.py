"""The table of a batch plan, at most 80 columns wide."""

from collections.abc import Iterator
import textwrap
from typing import Any

from optax_largebatch.plans.counts import written

WIDTH = 80
HEAD = 2
"""The lines above the stages."""
SHOWN = 16
"""The most stages in a table; a longer plan shows its first and its last ones."""


def table(plan: Any) -> str:
    """The stages of a plan, each with its numbers, and what the plan saves."""
    columns = [[*head, *map(str, cells)] for head, cells in _columns(plan)]
    widths = [max(map(len, column)) for column in columns]
    lines = ["  ".join(map(str.rjust, row, widths)).rstrip() for row in zip(*columns, strict=True)]
    left_out = len(plan.stages) - SHOWN
    if left_out > 1:
        half = SHOWN // 2
        lines[HEAD + half : -half] = [f"... {left_out} more stages ..."]
    return "\n".join([*lines, *_summary(plan)])


def _columns(plan: Any) -> Iterator[tuple[tuple[str, str], list[Any]]]:
    """The head of each column, in two lines, and its cells."""
    first = [stage.first_step for stage in plan.stages]
    last = [step - 1 for step in (*first[1:], plan.total_steps)]
    yield ("from", "step"), first
    yield ("batch", "size"), [stage.batch_size for stage in plan.stages]
    if plan.micro_batch_size is not None:
        yield ("micro-", "batches"), [plan.micro_batches(step) for step in first]
    unit = "examples" if plan.sequence_length is None else "tokens"
    seen = [stage.first_example * (plan.sequence_length or 1) for stage in plan.stages]
    yield (unit, "seen"), list(map(written, seen))
    for head, value, at in (
        ("learning rate", plan.rate, plan.learning_rate),
        ("weight decay", plan.decay, plan.weight_decay),
    ):
        if value is not None:
            yield ("", head), [_between(at, *ends) for ends in zip(first, last, strict=True)]


def _between(at: Any, first: int, last: int) -> str:
    """The values at both ends of a stage, or the one that both have."""
    begin, end = (f"{float(at(step)):.3g}" for step in (first, last))
    return begin if begin == end else f"{begin} to {end}"


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
    if plan.note:
        note = f"Stages: {plan.note}."
        yield from textwrap.wrap(note, WIDTH, break_long_words=False, break_on_hyphens=False)
