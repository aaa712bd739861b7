"""The table of a batch plan, at most 80 columns wide."""

from collections.abc import Callable, Iterator
import itertools
import textwrap
from typing import Any

import jax.numpy as jnp
import numpy as np

from optax_largebatch.plans.counts import written
from optax_largebatch.plans.law import KEPT, LAWS, SHARE_OF_ADAM

WIDTH = 80
HEAD = 2
"""The lines above the stages."""
SHOWN = 16
"""The most stages in a table; a longer plan shows its first and its last ones."""
LOOKED_AT = 1024
"""The steps at which the learning rate is computed, to find its peak and where it is 0."""
WAYS = ((str, "{:.3g} to {:.3g}"), (written, "{:.3g} to {:.3g}"), (written, "from {:.3g}"))
"""Ways to write integers, and a schedule from its values in the first and the last step of a stage.
The first way in which the table is narrow enough is taken."""


def table(plan: Any) -> str:
    """The stages of a plan, each with its numbers, and what the plan saves."""
    numbers = list(range(len(plan.stages)))
    left_out = len(numbers) - SHOWN
    if left_out > 1:
        numbers = [*numbers[: SHOWN // 2], *numbers[-SHOWN // 2 :]]
    lines: list[str] = []
    for write, schedule in WAYS:
        columns = [[*head, *cells] for head, cells in _columns(plan, numbers, write, schedule)]
        widths = [max(map(len, column)) for column in columns]
        rows = zip(*columns, strict=True)
        lines = ["  ".join(map(str.rjust, row, widths)).rstrip() for row in rows]
        if max(map(len, lines)) <= WIDTH:
            break
    if left_out > 1:
        lines.insert(HEAD + SHOWN // 2, f"... {left_out} more stages ...")
    return "\n".join([*lines, *_summary(plan)])


def _columns(
    plan: Any, numbers: list[int], write: Callable[[int], str], schedule: str
) -> Iterator[tuple[tuple[str, str], list[str]]]:
    """The head of each column, in two lines, and its cells for some of the stages.

    Args:
        plan: the plan.
        numbers: of the stages.
        write: how integers are written.
        schedule: how the first and the last value in a stage are written.
    """
    stages = [plan.stages[number] for number in numbers]
    ends = [stage.first_step for stage in plan.stages[1:]] + [plan.total_steps]
    yield ("from", "step"), [write(stage.first_step) for stage in stages]
    yield ("batch", "size"), [write(stage.batch_size) for stage in stages]
    if plan.micro_batch_size is not None:
        micro_batches = [plan.micro_batches(stage.first_step) for stage in stages]
        yield ("micro-", "batches"), list(map(write, micro_batches))
    unit = "examples" if plan.sequence_length is None else "tokens"
    seen = [stage.first_example * (plan.sequence_length or 1) for stage in stages]
    yield (unit, "seen"), list(map(written, seen))
    # The first and the last step of each stage, one after the other.
    edges = [(stage.first_step, ends[i] - 1) for stage, i in zip(stages, numbers, strict=True)]
    steps = jnp.asarray([*itertools.chain(*edges)], jnp.int32)
    if plan.run is None:
        return
    momentum = next(iter(plan.run.numbers))  # or b1; the account has the others
    for name in ("learning_rate", "weight_decay", momentum):
        value = getattr(plan.run, name)
        if name == "weight_decay" and value == 0:
            continue
        both = np.asarray(getattr(plan, name)(steps), float).reshape(-1, 2).tolist()
        upper, _, lower = name.rpartition("_")
        text = schedule if callable(value) else "{:.3g}"
        yield (upper, lower), [text.format(*pair) for pair in both]


def _summary(plan: Any) -> Iterator[str]:
    seen = f"{written(plan.examples)} examples"
    if plan.sequence_length is not None:
        seen += f", {written(plan.examples * plan.sequence_length)} tokens"
    yield f"{plan.total_steps} steps for {seen}."
    what, batch, r = "A constant batch of", plan.stages[0].batch_size, 1.0
    if plan.run is not None:
        what, batch, r = "The tuned run at", plan.run.batch_size, plan.length
    if (before := -(-round(plan.examples / r) // batch)) != plan.total_steps:
        share = plan.total_steps / before
        yield from _wrapped(f"{what} {batch} takes {before} steps; the plan {share:.0%} of that.")
    if plan.run is not None and callable(plan.run.learning_rate):
        yield from _of_the_rate(plan)
    if plan.note:
        yield from _wrapped(f"Stages: {plan.note}.")
    if plan.run is not None:
        yield from _account(plan, plan.run)


def _account(plan: Any, run: Any) -> Iterator[str]:
    """What moved from the tuned run to the last stage, and why."""
    batch = plan.stages[-1].batch_size
    r, law = plan.length, LAWS[plan.law]
    longer = f", examples times r = {r:.4g}" if r != 1 else ""
    yield from _wrapped(
        f"From {run.optimizer} at {run.batch_size} to {batch} by the law {plan.law!r} "
        f"(k = {batch / run.batch_size:.4g}{longer}):"
    )
    rows = []
    for name, (after, why) in plan.moved(batch).items():
        before = getattr(run, name) if "_" in name else run.numbers[name]
        if "_" in name:  # a factor
            before = run.peak if name == "learning_rate" else before
            before = None if callable(before) else before
            after = after if before is None else before * after
        if before == 0:
            continue
        change = f"times {after:.4g}" if before is None else f"{before:.4g} -> {after:.4g}"
        if name == "eps" and len(plan.stages) > 1 and law.eps != KEPT:
            why += ", all stages"
        rows.append((name, f"{before:.4g} (kept)" if before == after else change, why))
    warmup = 0 if law.keeps_warmup_steps else getattr(run.learning_rate, "warmup", 0)
    if warmup and r != 1:
        change = f"{written(warmup)} -> {written(round(warmup * r))}"
        rows.append(("warm-up", change, "the same part of the run"))
    width = max(len(change) for _, change, _ in rows)
    for name, change, why in rows:
        yield from _wrapped(f"  {name:<13}  {change:<{width}}  {why}", indent=19 + width)
    yield from _wrapped(law.valid)
    if assumed := [name for name in run.numbers if getattr(run, name) is None]:
        yield f"Assumed: {', '.join(assumed)}."
    yield from _wrapped(run.note)
    if run.peak:
        peaks = "{:.2g}, {:.2g}, {:.2g} (the plan's), {:.2g}".format(*plan.rates)
        yield from _wrapped(f"If you can search, try the peaks {peaks}.")
    if run.peak and plan.rates[2] > law.highest_rate:
        yield from _wrapped(
            f"Do not trust the rate: by this law, runs of ours with a rate above "
            f"{law.highest_rate:g} lost to a search. Try the lower ones, or begin with the lowest "
            f"rate that is about as good at {run.batch_size}."
        )


def _wrapped(sentence: str, indent: int = 0) -> list[str]:
    return textwrap.wrap(
        sentence,
        WIDTH,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _of_the_rate(plan: Any) -> Iterator[str]:
    """The peak of the learning rate, and whether it is 0 for a part of the run."""
    even = np.linspace(0, plan.total_steps - 1, LOOKED_AT).astype(np.int32)
    steps = np.union1d(even, [stage.first_step for stage in plan.stages]).astype(np.int32)
    rates = np.asarray(plan.learning_rate(jnp.asarray(steps)), float)
    if not (finite := np.isfinite(rates)).all():
        wrong = int(np.argmin(finite))
        yield f"The learning rate is {rates[wrong]} at step {steps[wrong]}."
        return
    peak = steps[np.argmax(rates)]
    adam = f", and Adam's {SHARE_OF_ADAM * rates.max():.3g}" * (plan.run.optimizer == "muonh")
    yield from _wrapped(f"The learning rate is at most {rates.max():.3g}{adam}, near step {peak}.")
    moving = np.flatnonzero(rates)
    last = int(steps[moving[-1]]) if moving.size else 0
    if last < 0.98 * (plan.total_steps - 1) - 1:
        yield from _wrapped(
            f"It is 0 from about step {last} on. Its schedule has to count examples, not steps."
        )
