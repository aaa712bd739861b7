"""How exactly the rate of embeddings, head and vectors has to be known beside MuonH.

    python -m benchmarks.rate_of_the_rest --keep      # half an hour on two CPU cores
    python -m benchmarks.rate_of_the_rest --report    # only the table

The networks of `benchmarks.tuned` with the settings that the searches chose for MuonH, and Adam at
other shares of its rate than 3/13. Writes one line for each run; the same command after an
interruption continues.
"""

import functools
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import optax
from tqdm import tqdm

from benchmarks.harness.command import run_and_show
from benchmarks.harness.pages import markdown
from benchmarks.harness.results import append, read
from benchmarks.transfer import searches
from benchmarks.tuned.arms import ARMS, Arm, muonh
from benchmarks.tuned.intervals import over_the_first
from benchmarks.tuned.training import compiled
from benchmarks.tuned.workloads import BERT, CAUSAL, WORKLOADS
from optax_largebatch.plans.law import SHARE_OF_ADAM

FACTORS = (1.0, 1 / 16, 1 / 4, 4.0)
"""Of the share that is usual, 3/13."""
SEEDS = range(11, 14)  # no search has seen them
CELLS = tuple((name, batch) for batch in ("512", "32") for name in (BERT.name, CAUSAL.name))


class Row(NamedTuple):
    """A run: a line of the table."""

    network: str
    batch: str
    factor: float
    seed: int
    test_loss: float


@functools.cache
def arm(factor: float) -> Arm:
    """MuonH as in `benchmarks.tuned`, with another rate for the rest."""

    def build(rate: optax.Schedule, *rest: Any) -> optax.GradientTransformation:
        return muonh(rate, *rest, others=lambda step: factor * SHARE_OF_ADAM * rate(step))

    return ARMS["muonh"]._replace(build=build)


def run(path: Path) -> None:
    """Runs what is left, and appends it to the table."""
    done = {row[:4] for row in read(path, Row)}
    runs = [(*cell, *run) for cell in CELLS for run in itertools.product(FACTORS, SEEDS)]
    for network, batch, factor, seed in tqdm([run for run in runs if run not in done], unit="run"):
        workload = WORKLOADS[network]
        chosen = searches(workload)["muonh"][batch].settings
        trained = compiled(workload.task(), arm(factor), side_by_side=1)
        (losses,) = trained(workload.plans[batch], [(chosen, seed)])
        append(path, Row(network, batch, factor, seed, losses.test))


def table(rows: list[Row]) -> str:
    """The losses at 3/13 of the rate, and the differences at other shares from them."""
    heads = ["network, batch", "3/13", *(f"{x:g} times it" for x in FACTORS[1:])]
    return markdown(heads, over_the_first(rows, CELLS, FACTORS))


if __name__ == "__main__":
    run_and_show("rate_of_the_rest", __doc__, run, lambda path: table(read(path, Row)))
