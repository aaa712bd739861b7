"""A small BERT while its batch grows: batch, rate, examples and loss against the steps.

    python -m benchmarks.batch_over_the_run --output benchmarks/results/cpu-2-cores \
        --guide docs/guides/choosing_a_batch_size.md

Four plans: a constant batch, one of twice the size, a ramp to four times the size after a quarter
of the examples, and Seesaw, which also grows four times. The task is that of
`tuned/bert.py`, trained by Adam with `accumulate_gradients`. All see the same examples
in the same order, with one peak rate: that with which the constant batch ends at the lowest
validation loss, of a grid and with other seeds. Writes `batch_over_the_run.csv` and `.png`, and
with --guide the table of its page. Takes ten minutes on two cores.
"""

import argparse
from collections.abc import Sequence
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
import numpy as np
import optax

from benchmarks.harness.colours import INK
from benchmarks.harness.pages import with_table
from benchmarks.harness.results import add_output, read, write_csv
from benchmarks.tuned.bert import SMALL, Bert
import optax_largebatch as lb

NAME = "batch_over_the_run"
MICRO_BATCH = 32
EXAMPLES = 1024 * MICRO_BATCH
WARMUP = EXAMPLES // 32
STAGES = {
    "constant": MICRO_BATCH,
    "twice the constant": 2 * MICRO_BATCH,
    "ramp": {0: MICRO_BATCH, EXAMPLES // 4: 4 * MICRO_BATCH},
    "Seesaw": lb.seesaw(MICRO_BATCH, largest_batch=4 * MICRO_BATCH),
}
LINES = {
    "constant": (lb.plots.COLOURS[0], 2.8),
    "twice the constant": (INK, 1.6),
    "ramp": (lb.plots.COLOURS[1], 1.6),
    "Seesaw": (lb.plots.COLOURS[2], 1.6),
}
"""The colour and the width of each line; the widest lies under the others."""
PEAKS = (0.0025, 0.005, 0.01, 0.02)
SEEDS, TUNING_SEEDS = (0, 1, 2, 3, 4), (1000, 1001)
BETWEEN = 32
"""Micro-batches from one evaluation to the next."""


LOSSES = ("validation_loss", "test_loss")


class Row(NamedTuple):
    """The losses of a run at a moment."""

    plan: str
    peak_rate: float
    seed: int
    step: int
    examples: int
    validation_loss: float
    test_loss: float


def planned(name: str) -> lb.BatchPlan:
    """The plan of this name, with a peak rate of 1."""
    return lb.batch_plan(
        STAGES[name],
        total=EXAMPLES,
        run=lb.TunedRun(
            "adamw",
            batch_size=MICRO_BATCH,
            total=EXAMPLES,
            learning_rate=lb.PlannedRate(1.0, warmup=WARMUP, decay="linear"),
        ),
        law="sqrt",
        micro_batch_size=MICRO_BATCH,
    )


def trained(task: Bert, name: str, peaks: Sequence[float], seeds: Sequence[int]) -> list[Row]:
    """The losses along the runs with each peak rate and each seed."""
    plan = planned(name)

    @jax.jit
    @jax.vmap
    def train(peak: jax.Array, seed: jax.Array) -> Any:
        for_params, for_examples = jax.random.split(jax.random.key(seed))
        params = task.init(for_params)
        optimizer = lb.accumulate_gradients(
            optax.adam(lambda step: peak * plan.learning_rate(step), b2=0.98),
            every=plan.micro_batches,
        )

        def micro_batch(carry: Any, start: jax.Array) -> Any:
            params, state = carry
            gradients = jax.grad(task.loss)(params, task.examples(for_examples, start))
            updates, state = optimizer.update(gradients, state, params)
            return (optax.apply_updates(params, updates), state), None

        def evaluated(carry: Any, starts: jax.Array) -> Any:
            (params, state), _ = jax.lax.scan(micro_batch, carry, starts)
            losses = [task.loss(params, own) for own in (task.validation, task.test)]
            return (params, state), (state.macro_step, *losses)

        starts = jnp.arange(0, EXAMPLES, MICRO_BATCH).reshape(-1, BETWEEN)
        return jax.lax.scan(evaluated, (params, optimizer.init(params)), starts)[1]

    runs = list(itertools.product(peaks, seeds))
    found = [np.asarray(own).tolist() for own in train(*map(jnp.asarray, zip(*runs, strict=True)))]
    return [
        Row(name, peak, seed, step, plan.examples_at(step), validation, test)
        for (peak, seed), *courses in zip(runs, *found, strict=True)
        for step, validation, test in zip(*courses, strict=True)
    ]


def compared() -> list[Row]:
    """The runs of all plans, with the peak rate that is best for the constant batch."""
    task = Bert(SMALL, held_out=512)
    tuning = trained(task, "constant", PEAKS, TUNING_SEEDS)
    ends = {
        peak: np.mean([row.validation_loss for row in at_the_end(tuning) if row.peak_rate == peak])
        for peak in PEAKS
    }
    print(
        "validation loss by peak rate:", {peak: f"{ends[peak]:.3f}" for peak in PEAKS}, flush=True
    )
    best = min(ends, key=ends.__getitem__)
    return [row for name in STAGES for row in trained(task, name, [best], SEEDS)]


def at_the_end(rows: Sequence[Row]) -> list[Row]:
    """The last row of each run."""
    return list({(row.plan, row.peak_rate, row.seed): row for row in rows}.values())


def table(rows: Sequence[Row]) -> str:
    """Steps and test loss at the end, in Markdown: means and standard deviations over the seeds."""
    ends = {name: [row for row in at_the_end(rows) if row.plan == name] for name in STAGES}
    reference = np.array([row.test_loss for row in ends["constant"]])
    lines = [
        "| plan | batch size | steps | test loss | over the constant batch, seed by seed |",
        "|---|---|---|---|---|",
    ]
    for name, own in ends.items():
        losses = np.array([row.test_loss for row in own])
        steps = own[0].step
        over = losses - reference
        apart = f"{over.mean():+.3f} ± {over.std(ddof=1):.3f}" if over.any() else ""
        sizes = [str(stage.batch_size) for stage in planned(name).stages]
        lines.append(
            f"| {name} | {', then '.join(sizes)} | {steps}, {steps / ends['constant'][0].step:.0%} "
            f"| {losses.mean():.3f} ± {losses.std(ddof=1):.3f} | {apart} |"
        )
    return "\n".join(lines)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Batch, rate, examples and loss against the steps."""
    figure = Figure(figsize=(4.8, 5.2), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True)
    (batch, rate), (examples, loss) = axes
    for name, (colour, width) in LINES.items():
        own = [row for row in rows if row.plan == name]
        plan = planned(name)
        steps = range(plan.total_steps)
        rates = own[0].peak_rate * np.asarray(plan.learning_rate(jnp.arange(plan.total_steps)))
        style = {"color": colour, "linewidth": width, "solid_capstyle": "round"}
        batch.plot(
            steps,
            [plan.batch_size(step) for step in steps],
            label=f"{name}, {plan.total_steps} steps",
            **style,
        )
        rate.plot(steps, rates, **style)
        examples.plot(steps, [plan.examples_at(step) for step in steps], **style)
        seeds = len({row.seed for row in own})
        losses = np.reshape([row.test_loss for row in own], (seeds, -1)).mean(axis=0)
        evaluated = [row.step for row in own][: len(losses)]
        loss.plot(evaluated, losses, **style)
        loss.plot(evaluated[-1], losses[-1], "o", color=colour, markersize=5)
    batch.set_yscale("log", base=2)
    sizes = [MICRO_BATCH * 2**power for power in range(3)]
    batch.set_yticks(sizes, map(str, sizes))
    examples.yaxis.set_major_formatter(EngFormatter(sep=""))
    titles = ("batch size", "learning rate", "examples seen", "test loss")
    for axis, title in zip(axes.flat, titles, strict=True):
        axis.set_title(title, loc="left", fontsize=10)
        axis.grid(alpha=0.25, linewidth=0.6)
    for axis in (rate, examples):
        axis.set_ylim(0, None)
    for axis in (examples, loss):
        axis.set_xlabel("step")
    figure.legend(
        loc="outside upper center",
        ncols=2,
        columnspacing=1.2,
        handlelength=1.5,
        frameon=False,
    )
    figure.savefig(path)


def main() -> None:
    """Runs everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_output(parser, NAME)
    parser.add_argument("--guide", type=Path, help="the page whose table to write")
    options = parser.parse_args()
    rows = compared()
    write_csv(
        [row._asdict() | {name: f"{getattr(row, name):.4f}" for name in LOSSES} for row in rows],
        options.output / f"{NAME}.csv",
    )
    rows = read(options.output / f"{NAME}.csv", Row)
    print(table(rows))
    plot(rows, options.output / f"{NAME}.png")
    if options.guide is not None:
        page = with_table(options.guide.read_text(), NAME, f"benchmarks.{NAME}", table(rows))
        options.guide.write_text(page)


if __name__ == "__main__":
    main()
