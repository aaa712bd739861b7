"""The table of a batch plan, at most 80 columns wide."""

from collections.abc import Callable, Iterator
import textwrap
from typing import Any

import jax.numpy as jnp
import numpy as np

from optax_largebatch.plans.counts import written
from optax_largebatch.plans.law import KEPT, LAWS, SHARE_OF_ADAM
from optax_largebatch.plans.stages import Stage

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
    ends = [*(stage.first_step for stage in plan.stages[1:]), plan.total_steps]
    stages = list(zip(plan.stages, ends, strict=True))
    left_out = len(stages) - SHOWN
    if left_out > 1:
        del stages[SHOWN // 2 : -SHOWN // 2]
    lines: list[str] = []
    for write, schedule in WAYS:
        columns = [[*head, *cells] for head, cells in _columns(plan, stages, write, schedule)]
        widths = [max(map(len, column)) for column in columns]
        rows = zip(*columns, strict=True)
        lines = ["  ".join(map(str.rjust, row, widths)).rstrip() for row in rows]
        if max(map(len, lines)) <= WIDTH:
            break
    if left_out > 1:
        lines.insert(HEAD + SHOWN // 2, f"... {left_out} more stages ...")
    for sentence in _summary(plan):
        lines += _wrapped(sentence)
    return "\n".join(lines)


def _columns(
    plan: Any,
    stages_and_ends: list[tuple[Stage, int]],
    write: Callable[[int], str],
    schedule: str,
) -> Iterator[tuple[tuple[str, str], list[str]]]:
    """The head of each column, in two lines, and its cells for some of the stages.

    Args:
        plan: the plan.
        stages_and_ends: each with the first step after it.
        write: how integers are written.
        schedule: how the first and the last value in a stage are written.
    """
    stages = [stage for stage, _ in stages_and_ends]
    yield ("from", "step"), [write(stage.first_step) for stage in stages]
    yield ("batch", "size"), [write(stage.batch_size) for stage in stages]
    if plan.micro_batch_size is not None:
        micro_batches = [plan.micro_batches(stage.first_step) for stage in stages]
        yield ("micro-", "batches"), list(map(write, micro_batches))
    unit = "examples" if plan.sequence_length is None else "tokens"
    seen = [stage.first_example * (plan.sequence_length or 1) for stage in stages]
    yield (unit, "seen"), list(map(written, seen))
    if plan.run is None:
        return
    momentum = next(iter(plan.run.numbers))  # or b1; the account has the others
    edges = jnp.asarray([(stage.first_step, end - 1) for stage, end in stages_and_ends], jnp.int32)
    for name in ("learning_rate", "weight_decay", momentum):
        value = getattr(plan.run, name)
        if name == "weight_decay" and value == 0:
            continue
        both = np.asarray(getattr(plan, name)(edges.ravel()), float).reshape(edges.shape)
        upper, _, lower = name.rpartition("_")
        text = schedule if callable(value) else "{:.3g}"
        yield (upper, lower), [text.format(*pair) for pair in both]


def _summary(plan: Any) -> Iterator[str]:
    """What the plan saves, and what moved: sentences."""
    seen = f"{written(plan.examples)} examples"
    if plan.sequence_length is not None:
        seen += f", {written(plan.examples * plan.sequence_length)} tokens"
    yield f"{plan.total_steps} steps for {seen}."
    what = "A constant batch of"
    batch = plan.stages[0].batch_size
    r = 1.0
    if plan.run is not None:
        what = "The tuned run at"
        batch = plan.run.batch_size
        r = plan.length
    if (before := -(-round(plan.examples / r) // batch)) != plan.total_steps:
        share = plan.total_steps / before
        yield f"{what} {batch} takes {before} steps; the plan {share:.0%} of that."
    if plan.run is not None and callable(plan.run.learning_rate):
        yield from _of_the_rate(plan)
    if plan.note:
        yield f"Stages: {plan.note}."
    if plan.run is not None:
        yield from _account(plan, plan.run)


def _account(plan: Any, run: Any) -> Iterator[str]:
    """What moved from the tuned run to the last stage, and why."""
    batch = plan.stages[-1].batch_size
    r = plan.length
    law = LAWS[plan.law]
    longer = f", examples times r = {r:.4g}" if r != 1 else ""
    yield (
        f"From {run.optimizer} at {run.batch_size} to {batch} by the law {plan.law!r} "
        f"(k = {batch / run.batch_size:.4g}{longer}):"
    )
    known = {"learning_rate": run.peak, "weight_decay": run.weight_decay} | run.numbers
    rows = []
    for name, (after, why) in plan.moved(batch).items():
        before = known[name]
        if before is None or callable(before):
            rows.append((name, f"times {after:.4g}", why))
            continue
        if before == 0:
            continue
        if name not in run.numbers:  # a factor
            after *= before
        if name == "eps" and len(plan.stages) > 1 and law.eps != KEPT:
            why += ", all stages"
        change = f"{before:.4g} (kept)" if before == after else f"{before:.4g} -> {after:.4g}"
        rows.append((name, change, why))
    warmup = 0 if law.keeps_warmup_steps else getattr(run.learning_rate, "warmup", 0)
    if warmup and r != 1:
        change = f"{written(warmup)} -> {written(round(warmup * r))}"
        rows.append(("warm-up", change, "the same part of the run"))
    width = max(len(change) for _, change, _ in rows)
    for name, change, why in rows:
        yield from _wrapped(f"  {name:<13}  {change:<{width}}  {why}", indent=19 + width)
    yield law.valid
    if assumed := [name for name in run.numbers if getattr(run, name) is None]:
        yield f"Assumed: {', '.join(assumed)}."
    yield run.note
    if run.peak:
        peaks = "{:.2g}, {:.2g}, {:.2g} (the plan's), {:.2g}".format(*plan.rates)
        yield f"If you can search, try the peaks {peaks}."
    if run.peak and plan.rates[2] > law.highest_rate:
        yield (
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
    yield f"The learning rate is at most {rates.max():.3g}{adam}, near step {peak}."
    moving = np.flatnonzero(rates)
    last = int(steps[moving[-1]]) if moving.size else 0
    if last < 0.98 * (plan.total_steps - 1) - 1:
        yield f"It is 0 from about step {last} on. Its schedule has to count examples, not steps."
