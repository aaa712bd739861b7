"""The critical batch size of AdamW, Muon and MuonH against the tokens of a run.

    python -m benchmarks.critical_batch_of_tokens --keep      # two hours of a CPU core
    python -m benchmarks.critical_batch_of_tokens --report    # only the tables

The network of C on four budgets of examples, 16 tokens each. In each cell the rate is searched:
from the neighbour's, by factors of 2 until the best is between two worse ones, and then the lowest
point of the parabola through these. The search has a seed of its own, and what is reported has
eight others. Momentum and decay stay, and so do the examples of a seed, in their order.

MuonH is also moved by the law, from what was chosen at batch 16 and at batch 64. Writes one line
for each run; the same command after an interruption continues.
"""

from collections.abc import Callable, Iterable, Sequence
import itertools
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from benchmarks.harness.command import run_and_show
from benchmarks.harness.pages import markdown
from benchmarks.harness.results import append, read
from benchmarks.tuned.arms import ARMS
from benchmarks.tuned.intervals import Difference, difference
from benchmarks.tuned.provenance import record
from benchmarks.tuned.schedules import schedule
from benchmarks.tuned.search import Settings
from benchmarks.tuned.training import compiled
from benchmarks.tuned.workloads import CAUSAL_LONG
import optax_largebatch as lb
from optax_largebatch.plans.law import LAWS

NAME = "critical_batch_of_tokens"
BUDGETS = tuple(2**power for power in range(13, 17))
BATCHES = tuple(2**power for power in range(4, 10))
FIRST_RATES = {"muonh": 0.1, "adamw": 0.01, "muon": 0.03}
"""Where the search begins at the smallest budget and batch."""
DECAYS = {"muonh": 0.0, "adamw": 0.1, "muon": 0.1}
MOMENTUM = 0.7  # the floor of the law
SEEDS = range(1, 9)
LAW_SEEDS = SEEDS[:4]
LAW_FROM = {16: BATCHES[1:], 64: (256, 512)}
TOKENS = 16  # of an example
FITTED = BATCHES[:4]
"""Those at which each target is reached."""
TARGETS = tuple(2**power for power in (13.5, 14, 14.5, 15))
"""A target is the loss of the smallest batch after so many examples."""
HALVES = (TARGETS[:2], TARGETS[2:])
AS_GOOD = 0.02  # of a loss


def plan_of(examples: int, batch: int) -> str:
    """The name of a plan."""
    return f"{batch} of {examples}"


WORKLOAD = CAUSAL_LONG._replace(
    name=NAME,
    title="small causal language model, four budgets",
    plans={
        plan_of(examples, batch): schedule(batch, examples)
        for examples, batch in itertools.product(BUDGETS, BATCHES)
    },
    optimizers=tuple(FIRST_RATES),
    order=(),
    arms=ARMS,
)


class Row(NamedTuple):
    """A run: a line of the table."""

    optimizer: str
    examples: int
    batch: int
    way: str
    """`search`, `best` for the chosen rate with new seeds, `law from 16` and `law from 64`."""
    learning_rate: float
    seed: int
    validation_loss: float
    test_loss: float


Cell = tuple[str, int, int]
Validate = Callable[[float], float]
"""From a rate to the validation loss of a run of the search."""


def searched(rate: float, loss: Validate) -> float:
    """The best rate, from one that is near it."""
    losses = {0: loss(rate)}
    best = 0
    while {best - 1, best + 1} - losses.keys():
        losses |= {own: loss(rate * 2.0**own) for own in (best - 1, best + 1) if own not in losses}
        best = min(losses, key=lambda own: losses[own])
    below, least, above = (losses[best + step] for step in (-1, 0, 1))
    lowest = (below - above) / (2 * (below - 2 * least + above))
    return rounded(rate * 2.0 ** (best + lowest))


def rounded(rate: float) -> float:
    """A rate as it stands in the table."""
    return float(f"{rate:.4g}")


def run(path: Path, optimizers: Iterable[str] = WORKLOAD.optimizers) -> None:
    """Runs what is left of some optimizers, and appends it to the table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record(path.with_suffix(".json"), WORKLOAD)
    done = {row[:6]: row for row in read(path, Row)}
    progress = tqdm(unit="run", initial=len(done))

    def losses(cell: Cell, way: str, rate: float, seed: int) -> Row:
        optimizer, examples, batch = cell
        place = (*cell, way, rounded(rate), seed)
        if place not in done:
            trained = compiled(WORKLOAD.task(), WORKLOAD.arms[optimizer], side_by_side=1)
            settings = Settings(0, rounded(rate), DECAYS[optimizer], MOMENTUM)
            (pair,) = trained(WORKLOAD.plans[plan_of(examples, batch)], [(settings, seed)])
            done[place] = Row(*place, *pair)
            append(path, done[place])
            progress.update()
        return done[place]

    for optimizer in optimizers:
        chosen = {BATCHES[0]: FIRST_RATES[optimizer]}
        for examples in BUDGETS:
            rate = chosen[BATCHES[0]]
            for batch in BATCHES:
                cell = (optimizer, examples, batch)
                progress.set_postfix_str(f"{optimizer} {plan_of(examples, batch)}")
                rate = searched(
                    rate, lambda own, cell=cell: losses(cell, "search", own, 0).validation_loss
                )
                chosen[batch] = rate
                for seed in SEEDS:
                    losses(cell, "best", rate, seed)
                rate *= math.sqrt(2)
            moves = LAW_FROM.items() if optimizer == "muonh" else ()
            for small, batch in ((own, batch) for own, larger in moves for batch in larger):
                law = LAWS[optimizer].moved({"momentum": MOMENTUM}, "rescaled", batch / small, 1)
                moved = chosen[small] * law["learning_rate"].value
                for seed in LAW_SEEDS:
                    losses((optimizer, examples, batch), f"law from {small}", moved, seed)


Losses = dict[int, dict[int, dict[int, float]]]
"""Test losses by batch size, budget and seed."""


def losses_of(rows: Iterable[Row], optimizer: str, way: str = "best") -> Losses:
    """The losses of an optimizer, at the chosen rates or at moved ones."""
    losses: Losses = {}
    for row in rows:
        if (row.optimizer, row.way) == (optimizer, way):
            of_budget = losses.setdefault(row.batch, {}).setdefault(row.examples, {})
            of_budget[row.seed] = row.test_loss
    return losses


def examples_to(target: float, of_budgets: dict[int, dict[int, float]], seed: int) -> float:
    """The examples to a loss: between two budgets the loss is a line in their logarithm."""
    budgets = sorted(of_budgets, reverse=True)
    losses = [of_budgets[budget][seed] for budget in budgets]
    if not losses[0] <= target <= losses[-1]:
        raise ValueError(f"no two budgets of seed {seed} have the loss {target:.3f} between them.")
    return math.exp(np.interp(target, losses, np.log(budgets)))


def mean_of(losses: Losses, batch: int, budget: int) -> float:
    """The mean of a cell over its seeds."""
    return float(np.mean([*losses[batch][budget].values()]))


def fits(
    losses: Losses,
    seeds: Iterable[int] = SEEDS,
    targets: Sequence[float] = TARGETS,
) -> list[lb.CriticalBatchSize]:
    """The critical batch sizes at the losses that the smallest batch has after some examples."""
    smallest = [mean_of(losses, BATCHES[0], budget) for budget in BUDGETS]
    return [
        lb.fit_critical_batch_size(
            FITTED,
            [[examples_to(x, losses[batch], seed) / batch for seed in seeds] for batch in FITTED],
        )
        for x in np.interp(np.log(targets), np.log(BUDGETS), smallest)
    ]


def exponent(of_targets: Iterable[lb.CriticalBatchSize]) -> float:
    """The power of the examples with which the critical batch size grows."""
    points = [(fit.minimum_examples, fit.critical_batch_size) for fit in of_targets]
    return float(np.polyfit(*np.log(points).T, 1)[0])


def exponent_by_seed(losses: Losses, targets: Sequence[float] = TARGETS) -> Difference:
    """The exponent in the mean over the seeds, with its interval."""
    exponents = {seed: exponent(fits(losses, [seed], targets)) for seed in SEEDS}
    return difference(exponents, dict.fromkeys(SEEDS, 0.0))


def largest_as_good(losses: Losses, budget: int) -> int:
    """The largest batch that ends within `AS_GOOD` of the smallest."""
    most = mean_of(losses, BATCHES[0], budget) + AS_GOOD
    return max(batch for batch in BATCHES if mean_of(losses, batch, budget) <= most)


def critical_table(rows: list[Row]) -> str:
    """The critical batch size of each optimizer at each target, and its exponent."""
    lines = []
    for optimizer in WORKLOAD.optimizers:
        losses = losses_of(rows, optimizer)
        of_targets = [f"{fit.critical_batch_size:.0f}" for fit in fits(losses)]
        exponents = (exponent_by_seed(losses, x) for x in (TARGETS, *HALVES))
        intervals = [f"{own.mean:.2f}±{own.high - own.mean:.2f}" for own in exponents]
        lines.append([f"`{optimizer}`", *of_targets, *intervals])
    heads = [f"{examples * TOKENS / 1000:.0f} thousand" for examples in TARGETS]
    return markdown(["optimizer", *heads, "exponent", "of the first two", "of the others"], lines)


def as_good_table(rows: list[Row]) -> str:
    """The largest batch that is about as good as the smallest, by the tokens of a run."""
    lines = []
    for optimizer in WORKLOAD.optimizers:
        losses = losses_of(rows, optimizer)
        lines.append([f"`{optimizer}`", *(str(largest_as_good(losses, x)) for x in BUDGETS)])
    heads = [f"{examples * TOKENS / 1000:.0f} thousand" for examples in BUDGETS]
    return markdown(["optimizer", *heads], lines)


def rate_powers(rows: list[Row], optimizer: str, largest: int) -> list[str]:
    """The powers of batch and examples with which the best rate goes, up to a batch."""
    best = {
        (row.batch, row.examples): row.learning_rate
        for row in rows
        if (row.optimizer, row.way) == (optimizer, "best") and row.batch <= largest
    }
    cells = np.log([*best])
    terms = np.column_stack([cells, np.ones(len(cells))])
    powers, *_ = np.linalg.lstsq(terms, np.log([*best.values()]), rcond=None)
    return [f"{power:+.2f}" for power in powers[:2]]


def rates_table(rows: list[Row]) -> str:
    """These powers for each optimizer."""
    ends = (FITTED[-1], BATCHES[-1])
    lines = []
    for optimizer in WORKLOAD.optimizers:
        of_batch, of_examples = zip(*(rate_powers(rows, optimizer, x) for x in ends), strict=True)
        lines.append([f"`{optimizer}`", *of_batch, *of_examples])
    heads = [f"{what}, to {end}" for what in ("batch", "tokens") for end in ends]
    return markdown(["optimizer", *heads], lines)


def law_over_search(rows: list[Row]) -> dict[str, list[Difference]]:
    """What each move of MuonH by the law loses to a search, for each budget."""
    best = losses_of(rows, "muonh")
    over = {}
    for small in LAW_FROM:
        for batch, of_budgets in losses_of(rows, "muonh", f"law from {small}").items():
            over[f"{small} to {batch}"] = [
                difference(of_seed, {seed: best[batch][budget][seed] for seed in of_seed})
                for budget, of_seed in of_budgets.items()
            ]
    return over


def show(path: Path) -> str:
    """All tables, and what each move by the law loses, for each budget."""
    rows = read(path, Row)
    moves = [", ".join([move, *map(str, over)]) for move, over in law_over_search(rows).items()]
    tables = (critical_table, as_good_table, rates_table)
    return "\n\n".join([*(table(rows) for table in tables), *moves])


if __name__ == "__main__":
    run_and_show(NAME, __doc__, run, show)
