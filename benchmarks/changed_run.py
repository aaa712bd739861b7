"""A run whose optimizer changes at its half: what the change costs, and what it brings.

    python -m benchmarks.changed_run --keep       # an hour of a CPU
    python -m benchmarks.changed_run --report     # only the tables

The two networks of `benchmarks.tuned`, with the settings that a search chose for each optimizer at
this batch size. At half of the examples the run goes on with another optimizer, whose moments are
adopted or begin anew. Beside them are runs that do not change. Writes one line for each run; the
same command after an interruption continues.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from tqdm import tqdm

from benchmarks.harness.machine import folder
from benchmarks.harness.pages import markdown
from benchmarks.harness.results import COMMITTED, RUNS, append, read
from benchmarks.tuned.arms import ARMS
from benchmarks.tuned.intervals import difference
from benchmarks.tuned.results import measured
from benchmarks.tuned.search import Settings
from benchmarks.tuned.sweep import committed
from benchmarks.tuned.training import mean_gradient, steps_of
from benchmarks.tuned.workloads import WORKLOADS
import optax_largebatch as lb

SEEDS = range(21, 26)  # no search and no other table has seen them
WATCHED = 16
"""The steps after the change after each of which the validation loss is taken."""


class Way(NamedTuple):
    """What a run does at its half."""

    first: str
    second: str
    is_adopted: bool = True
    """Whether the moments go over; or the second optimizer begins with its `init`."""


WAYS = {
    "adamw": Way("adamw", "adamw"),
    "adamw, then muonh": Way("adamw", "muonh"),
    "adamw, then muonh begun anew": Way("adamw", "muonh", is_adopted=False),
    "lamb": Way("lamb", "lamb"),
    "lamb, then muonh": Way("lamb", "muonh"),
    "muonh": Way("muonh", "muonh"),
}
CASES = {
    f"{name} {batch}": (name, batch) for batch in ("128", "2048") for name in ("causal", "bert")
}


class Row(NamedTuple):
    """A run: a line of the table."""

    case: str
    way: str
    seed: int
    rise: float
    """How far the loss is above that at the change, at most, in the steps that are watched."""
    steps_above: int
    """The last of these steps after which it is; 0 if it never is."""
    test_loss: float


Cell = Callable[[Sequence[Row], str, str], str]
"""From all runs, a case and a way to what a table says."""


class Change:
    """The runs of one way in a case, with all seeds."""

    def __init__(self, task: Any, plan: lb.BatchPlan, settings: dict[str, Settings], way: Way):
        self.task, self.way, self.settings = task, way, settings
        self.table, self.total = steps_of(plan), plan.total_steps
        steps = range(self.total)
        self.half = next(k for k in steps if 2 * plan.examples_at(k) >= plan.examples)
        self.first = self.build(way.first)
        self.second = self.build(way.second, 0 if way.is_adopted else self.half)
        self.train_first, self.train_second = map(self.trained, (self.first, self.second))
        self.validation = jax.jit(lambda params: task.loss(params, task.validation))

    def build(self, name: str, begins_at: int = 0) -> optax.GradientTransformation:
        """An optimizer, whose first step is that one of the plan."""
        tuned, table = self.settings[name], self.table
        return ARMS[name].build(
            lambda step: tuned.learning_rate * table.learning_rate[step + begins_at],
            lambda step: tuned.weight_decay * table.weight_decay[step + begins_at],
            tuned.momentum,
            self.task.stacked,
        )

    def trained(self, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
        """The function of some steps with an optimizer."""

        def some_steps(begin: Any, end: Any, key: Any, params: Any, state: Any) -> Any:
            def step(k: jax.Array, carry: Any) -> Any:
                params, state = carry
                batch = self.table.start[k], self.table.batch_size[k], 1
                gradient = mean_gradient(self.task, params, key, *batch)
                updates, state = optimizer.update(gradient, state, params)
                return optax.apply_updates(params, updates), state

            return jax.lax.fori_loop(begin, end, step, (params, state))

        return jax.jit(some_steps)

    def state_after(self, params: Any, state: Any) -> Any:
        """The state with which the run goes on."""
        if not self.way.is_adopted:
            return self.second.init(params)
        if self.way.first == self.way.second:
            return state
        adopted = {"old_optimizer": self.first, "step": self.half}
        return lb.adopt_state(self.second, params, state, **adopted)

    def run(self, seed: int) -> tuple[float, int, float]:
        """The rise of the loss, the steps above that at the change, and the test loss."""
        for_params, key = jax.random.split(jax.random.key(seed))
        params = self.task.init(for_params)
        params, state = self.train_first(0, self.half, key, params, self.first.init(params))
        state = self.state_after(params, state)
        before = float(self.validation(params))
        rises = []
        end = min(self.half + WATCHED, self.total)
        for k in range(self.half, end):
            params, state = self.train_second(k, k + 1, key, params, state)
            rises.append(float(self.validation(params)) - before)
        params, _ = self.train_second(end, self.total, key, params, state)
        above = [k for k, rise in enumerate(rises, 1) if rise > 0]
        test_loss = float(self.task.loss(params, self.task.test))
        return max(0.0, *rises), max(above, default=0), test_loss


def case_of(case: str) -> tuple[Any, lb.BatchPlan, dict[str, Settings]]:
    """The network of a case, its plan, and the settings of each optimizer."""
    name, batch = CASES[case]
    workload = WORKLOADS[name]
    results = measured(workload, committed(workload))
    settings = {optimizer: cells[batch].settings for optimizer, cells in results.items()}
    return workload.task(), workload.plans[batch], settings


def run(path: Path, cases: Sequence[str]) -> None:
    """Runs what is left, and appends it to the table."""
    done = {(row.case, row.way, row.seed) for row in read(path, Row)}
    for case in cases:
        task_plan_settings = case_of(case)
        for name, way in tqdm(WAYS.items(), desc=case, unit="way"):
            seeds = [seed for seed in SEEDS if (case, name, seed) not in done]
            change = Change(*task_plan_settings, way) if seeds else None
            for seed in seeds:
                rise, steps_above, test_loss = change.run(seed)
                append(
                    path, Row(case, name, seed, round(rise, 5), steps_above, round(test_loss, 5))
                )


def finished(rows: Sequence[Row], case: str, way: str) -> dict[int, Row]:
    """The runs of a way by seed; none if they are not all there."""
    own = {row.seed: row for row in rows if (row.case, row.way) == (case, way)}
    return own if len(own) == len(SEEDS) else {}


def test_loss(rows: Sequence[Row], case: str, way: str) -> str:
    """The mean test loss, and how far it is from that of the first optimizer alone."""
    own, others = (
        {seed: row.test_loss for seed, row in finished(rows, case, name).items()}
        for name in (way, WAYS[way].first)
    )
    mean = f"{np.mean([*own.values()]):.3f}" if own else ""
    return f"{mean}, {difference(own, others)}" if own and others and own != others else mean


def rise(rows: Sequence[Row], case: str, way: str) -> str:
    """How far the loss rose, and the steps above that at the change: medians over the seeds."""
    runs = finished(rows, case, way).values()
    if not runs:
        return ""
    steps = int(np.median([row.steps_above for row in runs]))
    return f"{np.median([row.rise for row in runs]):.2f}, {steps} step{'s' * (steps != 1)}"


def table(rows: Sequence[Row], cell: Cell) -> str:
    """A line for each way, a column for each case."""
    lines = [[way, *(cell(rows, case, way) for case in CASES)] for way in WAYS]
    return markdown(["run", *CASES], lines)


TABLES: dict[str, Cell] = {"losses": test_loss, "rises": rise}


def main() -> None:
    """Runs what is left, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keep", action="store_true", help="into benchmarks/results")
    parser.add_argument("--report", action="store_true", help="only the tables")
    parser.add_argument("--case", nargs="+", choices=CASES, default=[*CASES], help="default: all")
    args = parser.parse_args()
    results = COMMITTED / folder()
    path = (results if args.keep or args.report else RUNS) / "changed_run.csv"
    if not args.report:
        run(path, args.case)
    for cell in TABLES.values():
        print(table(read(path, Row), cell), end="\n\n")


if __name__ == "__main__":
    main()
