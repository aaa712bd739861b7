"""MuonH and matrices that start at zero: how large is the ball in which they grow?

    python -m benchmarks.zeros --keep       # an hour of a CPU
    python -m benchmarks.zeros --report     # only the table

The two networks of `benchmarks.tuned`, in each layer with the last matrix of attention and of the
perceptron at zero. Every way has the settings that a search chose for its optimizer from a random
start, at rates around that one. Then adapters, of which the second matrix is zero. All rates are
run with the first seed, and the best one with two more; the validation loss chooses, and the test
loss is shown, in the mean over the seeds, with the difference from the ball that `hyperball` has:
below 0 is better. Writes one line for each run; the same command after an interruption continues.
"""

from collections.abc import Callable, Sequence
import copy
import functools
import itertools
import math
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
from tqdm import tqdm

from benchmarks.harness.command import run_and_show
from benchmarks.harness.pages import markdown
from benchmarks.harness.results import append, read
from benchmarks.tuned import arms
from benchmarks.tuned.adapters import Adapters
from benchmarks.tuned.arms import LAYERS, Arm
from benchmarks.tuned.intervals import difference
from benchmarks.tuned.results import measured
from benchmarks.tuned.schedules import constant
from benchmarks.tuned.search import Settings
from benchmarks.tuned.sweep import committed
from benchmarks.tuned.training import Losses, compiled
from benchmarks.tuned.workloads import WORKLOADS
import optax_largebatch as lb
from optax_largebatch.transforms import hyperball

ZEROS = lb.matching("(output|down|second)/kernel")
SEEDS = range(11, 14)  # no search and no other table has seen them
FAR = 1000.0  # the factor of a ball that no run comes near


class Way(NamedTuple):
    """Who moves the matrices of zeros."""

    optimizer: str
    """One of `ARMS`, whose settings it has."""
    arm: Arm
    factor: float = 1.0
    """That of the ball."""


def muonh(factor: float = 1.0, **options: Any) -> Way:
    """MuonH as in `benchmarks.tuned`, with other arguments."""
    build = functools.partial(arms.muonh, **options)
    return Way("muonh", arms.ARMS["muonh"]._replace(build=build), factor)


STEPS_OF_BALL = lb.param_groups({"params": ZEROS, "learning_rate_scale": 0.5 / FAR})
BALLS = tuple(f"muonh, ball of {factor}" for factor in (0.25, 0.5, 1.0, 2.0))
OURS = f"muonh, ball of {hyperball.BALL_OF_ZEROS}"
RANDOM, FREE = "muonh, random start", "muonh, no bound"
WAYS = {
    RANDOM: muonh(),
    **{name: muonh(float(name.split()[-1])) for name in BALLS},
    FREE: muonh(FAR, groups=STEPS_OF_BALL),
    "muonh, zeros by Adam": muonh(matrix_mask=LAYERS & ~ZEROS),
    "muon": Way("muon", arms.ARMS["muon"]),
    "adamw": Way("adamw", arms.ARMS["adamw"]),
}


class Case(NamedTuple):
    """A task with the batches of a run."""

    task: Any
    plan: lb.BatchPlan
    settings: dict[str, Settings]
    """Those of each optimizer."""
    factors: Sequence[float]
    """The rates that are tried, over that of the settings."""
    ways: Sequence[str]

    def run(self, way: str, settings: Settings, seed: int) -> Losses:
        """The losses of a run."""
        task = self.task if way == RANDOM else with_zeros(self.task)
        train = compiled(task, WAYS[way].arm, side_by_side=1)
        with mock.patch.object(hyperball, "BALL_OF_ZEROS", WAYS[way].factor):
            return next(iter(train(self.plan, [(settings, seed)])))


def network(name: str, batch: str) -> Case:
    """A network of `benchmarks.tuned`."""
    workload = WORKLOADS[name]
    results = measured(workload, committed(workload))
    settings = {optimizer: own[batch].settings for optimizer, own in results.items()}
    ways = [*WAYS] if batch == "512" else [RANDOM, *BALLS[1:3], FREE]
    return Case(workload.task(), workload.plans[batch], settings, (0.5, 0.7, 1, 1.4, 2), ways)


def adapters(apart: float) -> Case:
    """The adapters, which have no other start."""
    rates = {"adamw": 0.04, "muon": 0.1, "muonh": 0.2}
    settings = {name: Settings(0, rate, 0.0, 0.9) for name, rate in rates.items()}
    plan = constant({256: 60})["256"]
    return Case(Adapters(apart), plan, settings, (0.25, 0.5, 1.0, 2.0, 4.0), [*WAYS][1:])


CASES: dict[str, Callable[[], Case]] = {
    **{
        f"{name} {batch}": functools.partial(network, name, batch)
        for batch in ("512", "2048")
        for name in ("causal", "bert")
    },
    **{f"adapters {apart}": functools.partial(adapters, apart) for apart in (0.1, 0.5)},
}


class Row(NamedTuple):
    """A run: a line of the table."""

    case: str
    way: str
    learning_rate: float
    weight_decay: float
    momentum: float
    seed: int
    validation_loss: float
    test_loss: float

    @property
    def what(self) -> tuple[Any, ...]:
        """What was run."""
        return self[:-2]


@functools.cache
def with_zeros(task: Any) -> Any:
    """The task, the parameters of `ZEROS` at zero."""

    def init(key: jax.Array) -> Any:
        params = task.init(key)
        return jax.tree.map(lambda x, is_zero: x * (not is_zero), params, ZEROS.mask(params))

    other = copy.copy(task)
    other.init = init
    return other


def run(path: Path, cases: dict[str, Callable[[], Case]] = CASES) -> None:
    """Runs what is left, and appends it to the table."""
    rows = read(path, Row)
    for name, make in cases.items():
        case = make()
        runs = len(case.ways) * (len(case.factors) + len(SEEDS) - 1)
        with tqdm(total=runs, desc=name, unit="run") as progress:
            for way, seed in itertools.product(case.ways, SEEDS):
                own = case.settings[WAYS[way].optimizer]
                rates = [float(f"{own.learning_rate * factor:.4g}") for factor in case.factors]
                for rate in rates if seed == SEEDS[0] else [chosen(rows, name, way)]:
                    row = Row(name, way, rate, *own[2:], seed, math.nan, math.nan)
                    if row.what not in {row.what for row in rows}:
                        settings = own._replace(trial=0, learning_rate=rate)
                        validation, test = case.run(way, settings, seed)
                        rows.append(row._replace(validation_loss=validation, test_loss=test))
                        append(path, rows[-1])
                    progress.update()


def chosen(rows: Sequence[Row], case: str, way: str) -> float:
    """The rate with the least validation loss with the first seed."""
    first = [row for row in rows if row[:2] == (case, way) and row.seed == SEEDS[0]]
    return min(first, key=lambda row: np.nan_to_num(row.validation_loss, nan=np.inf)).learning_rate


def losses_of(rows: Sequence[Row], case: str, way: str) -> dict[int, float]:
    """The test losses with the chosen rate, by seed; none if they are not all there."""
    own = [row for row in rows if row[:2] == (case, way)]
    losses = {row.seed: row.test_loss for row in own if row.learning_rate == chosen(own, case, way)}
    return losses if len(losses) == len(SEEDS) else {}


def table(rows: Sequence[Row], cases: Sequence[str]) -> str:
    """The mean test losses, and how far they are from those of `hyperball` as it is."""
    lines = []
    for way in WAYS:
        cells = []
        for case in cases:
            own, ours = (losses_of(rows, case, name) for name in (way, OURS))
            mean = f"{np.mean([*own.values()]):.3f}" if own else ""
            is_other = own and ours and own != ours
            cells.append(f"{mean}, {difference(own, ours)}" if is_other else mean)
        if any(cells):
            lines.append([way, *cells])
    return markdown(["way", *cases], lines)


if __name__ == "__main__":
    run_and_show("zeros", __doc__, run, lambda path: table(read(path, Row), [*CASES]))
