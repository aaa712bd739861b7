"""The table of a batch plan, at most 80 columns wide."""

from collections.abc import Callable, Iterator
import math
import textwrap
from typing import Any

import jax.numpy as jnp
import numpy as np

from optax_largebatch.plans.counts import written
from optax_largebatch.plans.law import KEPT, SHARE_OF_ADAM, SPHERES
from optax_largebatch.plans.stages import Stage
from optax_largebatch.plans.tuned_run import TunedRun, law_of

WIDTH = 80
HEAD = 2
"""The lines above the stages."""
SHOWN = 16
"""The most stages in a table; a longer plan shows its first and its last ones."""
LOOKED_AT = 1024
"""The steps at which the learning rate is computed, to find its peak and where it is 0."""
CLOSE = 0.005
"""How far the largest rate of a run may be from the peak of its schedule without a word."""
WAYS = ((str, "{} to {}"), (written, "{} to {}"), (written, "from {}"))
"""Ways to write integers, and a schedule from its values in the first and the last step of a stage.
The first way in which the table is narrow enough is taken."""


def table(plan: Any, learning_rate: Any) -> str:
    """The stages of a plan, each with its numbers; what moved, and the time.

    Args:
        plan: the plan.
        learning_rate: that of its run, with the warm-up of its law; None without a run.
    """
    ends = [*(stage.first_step for stage in plan.stages[1:]), plan.total_steps]
    stages = list(zip(plan.stages, ends, strict=True))
    steps = telling_steps(plan, LOOKED_AT, getattr(learning_rate, "warmup", 0))
    left_out = len(stages) - SHOWN
    if left_out > 1:
        del stages[SHOWN // 2 : -SHOWN // 2]
    lines: list[str] = []
    for way in WAYS:
        columns = [[*head, *cells] for head, cells in _columns(plan, stages, steps, *way)]
        widths = [max(map(len, column)) for column in columns]
        rows = zip(*columns, strict=True)
        lines = ["  ".join(map(str.rjust, row, widths)).rstrip() for row in rows]
        if max(map(len, lines)) <= WIDTH:
            break
    if left_out > 1:
        lines.insert(HEAD + SHOWN // 2, f"... {left_out} more stages ...")
    for sentence in _summary(plan, steps):
        lines += _wrapped(sentence)
    return "\n".join(lines)


def _columns(
    plan: Any,
    stages_and_ends: list[tuple[Stage, int]],
    steps: np.ndarray,
    write: Callable[[int], str],
    schedule: str,
) -> Iterator[tuple[tuple[str, str], list[str]]]:
    """The head of each column, in two lines, and its cells for some of the stages.

    Args:
        plan: the plan.
        stages_and_ends: each with the first step after it.
        steps: where schedules are looked at.
        write: how integers are written.
        schedule: how the first and the last value in a stage are written.
    """
    stages = [stage for stage, _ in stages_and_ends]
    yield ("from", "step"), [write(stage.first_step) for stage in stages]
    yield ("batch", "size"), [write(stage.batch_size) for stage in stages]
    if plan.micro_batch_size is not None:
        micro_batches = [write(plan.micro_batches(stage.first_step)) for stage in stages]
        yield ("micro-", "batches"), micro_batches
    unit = "examples" if plan.sequence_length is None else "tokens"
    tokens = plan.sequence_length or 1
    yield (unit, "seen"), [written(stage.first_example * tokens) for stage in stages]
    if plan.run is None:
        return
    for name in shown_numbers(plan.run):
        values = np.asarray(getattr(plan, name)(jnp.asarray(steps)), float)
        text = schedule if callable(getattr(plan.run, name)) else "{}"
        within = [
            values[(steps >= stage.first_step) & (steps < end)] for stage, end in stages_and_ends
        ]
        upper, _, lower = name.rpartition("_")
        yield (upper, lower), [_over(of_stage, text) for of_stage in within]


def shown_numbers(run: TunedRun) -> list[str]:
    """The numbers that have a column or a plot: the rate, the decay unless it is 0, and one more.

    That is the momentum or b1. The account of a table has the others.
    """
    decay = ["weight_decay"] if run.weight_decay != 0 else []
    return ["learning_rate", *decay, next(iter(run.numbers))]


def _over(values: np.ndarray, text: str) -> str:
    """The values in a stage as its first and last ones, with the peak between them."""
    first, peak, last = (f"{x:.3g}" for x in (values[0], values.max(), values[-1]))
    return text.format(first, last if peak in (first, last) else f"{peak} to {last}")


def telling_steps(plan: Any, number: int, warmup: int = 0) -> np.ndarray:
    """Steps that show a schedule: even ones, both ends of each stage, and that of the warm-up."""
    last = plan.total_steps - 1
    firsts = np.array([stage.first_step for stage in plan.stages])
    ends = [*firsts, *(firsts - 1)]
    if warmup:
        ends.append(plan.step_at(tokens=round(warmup * plan.length)))
    return np.unique(np.clip([*np.linspace(0, last, number), *ends], 0, last).astype(np.int32))


def _summary(plan: Any, steps: np.ndarray) -> Iterator[str]:
    """The steps of the plan, what moved, and the time: sentences."""
    seen = f"{written(plan.examples)} examples"
    if plan.sequence_length is not None:
        seen += f", {written(plan.examples * plan.sequence_length)} tokens"
    run: Any = plan.run
    compared = "a constant batch of"
    batch = plan.stages[0].batch_size
    r = 1.0
    if run is not None:
        compared = "the tuned run at"
        batch = run.batch_size
        r = plan.length
    before = -(-round(plan.examples / r) // batch)
    takes = f"; {compared} {batch} takes {before}" * (before != plan.total_steps)
    yield f"{plan.total_steps} steps for {seen}{takes}."
    rates = np.zeros(0) if run is None else np.asarray(plan.learning_rate(jnp.asarray(steps)))
    if run is not None and callable(run.learning_rate):
        yield from _mistakes(plan, steps, rates)
    if plan.note:
        yield f"Stages: {plan.note}."
    if run is not None:
        yield from _account(plan, run, float(rates.max()))
    if r != 1 or any(stage.batch_size != batch for stage in plan.stages):
        yield _times(plan, batch, r)


def _account(plan: Any, run: Any, highest: float) -> Iterator[str]:
    """What moved from the tuned run to the last stage, and why; `highest` is the largest rate."""
    batch = plan.stages[-1].batch_size
    r = plan.length
    law = law_of(run, plan.law)
    longer = f", examples times r = {r:.4g}" if r != 1 else ""
    yield (
        f"From {run.optimizer} at {run.batch_size} to {batch} by the law {plan.law!r} "
        f"(k = {batch / run.batch_size:.4g}{longer}):"
    )
    known = {"learning_rate": run.peak, "weight_decay": run.weight_decay} | run.numbers
    rows = []
    for name, (after, why) in plan.moved(batch).items():
        before = known[name]
        label = "peak rate" if name == "learning_rate" else name
        if before is None or callable(before):
            rows.append((label, f"times {after:.4g}", why))
            continue
        if not before:
            continue
        if name not in run.numbers:  # a factor
            after *= before
        if name == "eps" and len(plan.stages) > 1 and law.eps != KEPT:
            why += ", all stages"
        if name == "learning_rate" and not math.isclose(highest, after, rel_tol=CLOSE):
            why += f"; reaches {highest:.3g}"
        rows.append((label, _change(before, after), why))
        if name == "learning_rate" and run.optimizer in SPHERES:
            of_adam = _change(SHARE_OF_ADAM * before, SHARE_OF_ADAM * after)
            rows.append(("rate of Adam", of_adam, f"{SHARE_OF_ADAM:.3g} of it"))
    rate = run.learning_rate
    lengths = {"warm-up": getattr(rate, "warmup", 0), "hold": getattr(rate, "hold", 0)}
    if law.keeps_warmup_steps:
        del lengths["warm-up"]
    for label, length in lengths.items():
        if length and r != 1:
            change = f"{written(length)} -> {written(round(length * r))}"
            rows.append((label, change, "the same part of the run"))
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


def _change(before: float, after: float) -> str:
    return f"{before:.4g} (kept)" if before == after else f"{before:.4g} -> {after:.4g}"


def _times(plan: Any, batch: int, r: float) -> str:
    """The examples, and the time over that of the run before: on its devices and on more of them.

    A step takes as long as its examples on a device, which are no fewer than in the run before.

    Args:
        plan: the plan.
        batch: the batch size of the run before.
        r: the examples over those of the run before.
    """
    firsts = [stage.first_example for stage in plan.stages]
    lengths = np.diff([*firsts, plan.examples])
    k = np.maximum([stage.batch_size / batch for stage in plan.stages], 1)

    def time(devices: float) -> float:
        return r * float(np.sum(lengths / np.minimum(k, devices))) / plan.examples

    most = float(k.max())
    powers = (2.0**power for power in range(1, 63))
    faster = next((x for x in powers if x < most and time(x) < 1), most)
    times = [f"{time(1):.3g}x the time on the same devices"]
    times += [f"{time(x):.3g}x on {x:.4g}x as many" for x in sorted({faster, most}) if x > 1]
    tokens = plan.sequence_length or 1
    unit = "examples" if plan.sequence_length is None else "tokens"
    seen = f"{written(plan.examples * tokens)} {unit}"
    if r != 1:
        seen += f" in place of {written(int(plan.run.total))}"
    return f"{seen}: at best {', '.join(times)}."


def _wrapped(sentence: str, indent: int = 0) -> list[str]:
    return textwrap.wrap(
        sentence,
        WIDTH,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _mistakes(
    plan: Any,
    steps: np.ndarray,
    rates: np.ndarray,
) -> Iterator[str]:
    """Whether the learning rate is not finite, or 0 for a part of the run."""
    if not (finite := np.isfinite(rates)).all():
        wrong = int(np.argmin(finite))
        yield f"The learning rate is {rates[wrong]} at step {steps[wrong]}."
        return
    moving = np.flatnonzero(rates)
    last = int(steps[moving[-1]]) if moving.size else 0
    if last < 0.98 * (plan.total_steps - 1) - 1:
        yield f"It is 0 from about step {last} on. Its schedule has to count examples, not steps."
