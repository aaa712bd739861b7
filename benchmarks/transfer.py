r"""What following a law costs: settings of a small batch, moved to a large one without a search.

    python -m benchmarks.transfer --report                                # only the tables
    python -m benchmarks.transfer --keep --workload causal --optimizer muonh --pair 32 2048 \
        --way law sqrt --seeds 5                                          # four minutes of a CPU
    python -m benchmarks.transfer --file own.py       # optimizers and tasks of your own
    PYTHON=python3 benchmarks/evidence_on_a_gpu.sh                        # everything, on a GPU

The start is what the search of `benchmarks.tuned` chose at the small batch; the end is the loss of
the search at the large one. In between are the same settings kept, moved by the root of the batch
alone, by the law of `batch_plan`, by the law with the momentum kept or with another floor, and by
the law from the lowest rate that was about as good. Along a ramp the settings follow the batch.
Seeds, networks and numbers of steps are those of the search, which had seen none of these seeds. On
another machine than that of the search, run what it chose as well: `--pair 2048 2048 --way kept`.
Writes one line for each run; the same command after an interruption continues.
"""

import argparse
from collections.abc import Iterable, Sequence
import itertools
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from benchmarks.harness.machine import folder
from benchmarks.harness.pages import markdown
from benchmarks.harness.results import COMMITTED, RUNS, append, read
from benchmarks.tuned import sweep
from benchmarks.tuned.intervals import Difference, difference
from benchmarks.tuned.provenance import record
from benchmarks.tuned.results import Measured, Results, measured
from benchmarks.tuned.search import Settings
from benchmarks.tuned.training import compiled
from benchmarks.tuned.workloads import BERT, WORKLOADS, Workload, workloads_in
from optax_largebatch.plans.law import KEPT, LAWS, Law, own_law
from optax_largebatch.plans.tuned_run import FAMILIES

Pairs = tuple[tuple[str, str], ...]
PAIRS: Pairs = (
    *(("32", "512"), ("32", "2048"), ("128", "2048")),
    *(("32", "128"), ("128", "512"), ("512", "2048")),
    *(("16", "128"), ("16", "512")),
    *(("constant", name) for name in ("two_stages", "seesaw", "four_times")),
)
FLOORS = (0, 0.5, 0.6, 0.8, 0.9)
WAYS = ("law", "kept", "sqrt", "momentum kept", "lowest rate", *(f"floor {x}" for x in FLOORS))
"""The laws that are compared; the law itself has a floor of 0.7."""
SHOWN = ("law", "kept", "sqrt", "momentum kept", "lowest rate")
ENDS = {"lowest rate": min, "highest rate": max}
"""Ways that begin with the lowest or the highest rate that is about as good as the best."""
SETTLED = (0.1, 0.3, 1, 3, 10)
ON_DEMAND = ("highest rate", *(f"settled {x:g}" for x in SETTLED))
"""The law from other starts: from the highest rate about as good as the best, or from the rate
sqrt(rate x decay) of an AdamW whose rate x decay x steps is so large."""
AS_GOOD = 0.05
"""What the start of `lowest rate` and `highest rate` may lose at the small batch."""


class Row(NamedTuple):
    """A run: a line of the table."""

    workload: str
    optimizer: str
    small: str
    large: str
    way: str
    learning_rate: float
    weight_decay: float
    momentum: float
    seed: int
    test_loss: float

    @property
    def place(self) -> tuple[str, str, str, str, str]:
        """What was run, but for the seed."""
        return self[:5]


def law_of(workload: Workload, optimizer: str, way: str) -> Law:
    """The law of this name for an optimizer."""
    law = own_law(own) if (own := workload.laws.get(optimizer)) else LAWS["muonh"]
    if way.startswith("floor"):
        return law._replace(momentum_floor=float(way.split()[1]))
    return {"momentum kept": law._replace(momentum=KEPT)}.get(way) or LAWS.get(way) or law


def moved(
    workload: Workload, optimizer: str, start: Settings, small: str, large: str, law: Law
) -> Settings:
    """The settings at the large batch, or at the first batch of a ramp."""
    old, plan = (workload.plans[name] for name in (small, large))
    k, r = plan.batch_size(0) / old.batch_size(0), plan.examples / old.examples
    new = law.moved({"momentum": start.momentum}, FAMILIES.get(optimizer, ("decoupled",))[0], k, r)
    return start._replace(
        learning_rate=start.learning_rate * new["learning_rate"].value,
        weight_decay=start.weight_decay * new["weight_decay"].value,
        momentum=new["momentum"].value,
    )


def start(found: Measured, way: str, steps: int) -> Settings:
    """The settings at the small batch, of a run of so many steps: the best, or others."""
    chosen = found.settings
    if way.startswith("settled"):
        return chosen._replace(learning_rate=math.sqrt(float(way.split()[1]) / steps))
    if way not in ENDS:
        return chosen
    most = found.searched[chosen] + AS_GOOD
    good = [own for own, loss in found.searched.items() if loss <= most]
    return ENDS[way](good, key=lambda own: own.learning_rate)


def pairs_of(workload: Workload) -> Pairs:
    """The moves of a workload: those of `PAIRS`, or from each batch to each after it."""
    ours = tuple(pair for pair in PAIRS if {*pair} <= workload.plans.keys())
    return ours or tuple(itertools.combinations(workload.plans, 2))


def run(args: argparse.Namespace, workloads: Iterable[Workload], path: Path) -> None:
    """Runs what is left, and appends it to the table."""
    done = {(*row.place, row.seed) for row in read(path, Row)}
    for workload in workloads:
        record(path.with_name(f"{path.stem}_{workload.name}.json"), workload)
        results = searches(workload, args.file)
        jobs: dict[tuple[str, str, bool], list[tuple[Row, Settings]]] = {}
        moves = itertools.product(
            args.optimizer or workload.optimizers, args.pair or pairs_of(workload), args.way
        )
        for optimizer, pair, way in moves:
            small, large = pair
            found = results.get(optimizer, {}).get(small)
            if found is None or large not in workload.plans:
                continue
            law = law_of(workload, optimizer, way)
            follows = len(workload.plans[large].stages) > 1 and law.momentum != KEPT
            begin = start(found, way, workload.plans[small].total_steps)
            settings = moved(workload, optimizer, begin, small, large, law)
            for seed in workload.budget.final_seeds[: args.seeds]:
                row = Row(workload.name, optimizer, *pair, way, *settings[1:], seed, math.nan)
                if (*row.place, seed) not in done:
                    jobs.setdefault((optimizer, large, follows), []).append((row, settings))
        total = sum(map(len, jobs.values()))
        with tqdm(total=total, desc=workload.name, unit="run") as progress:
            for (optimizer, large, follows), own in jobs.items():
                trained = compiled(
                    workload.task(), workload.arms[optimizer], workload.budget.trials, follows
                )
                losses = trained(workload.plans[large], [(x, row.seed) for row, x in own])
                for (row, _), loss in zip(own, losses, strict=True):
                    append(path, row._replace(test_loss=loss.test))
                    progress.update()


Losses = dict[tuple[str, ...], dict[int, float]]


def losses_of(rows: list[Row], workload: Workload) -> Losses:
    """The test losses by seed of everything that was run."""
    losses: Losses = {}
    for row in rows:
        if row.workload == workload.name:
            losses.setdefault(row.place, {})[row.seed] = row.test_loss
    return losses


def searched(losses: Losses, place: tuple[str, ...], results: Results) -> dict[int, float]:
    """The losses of what the search chose at the target, on the machine of the other runs.

    There are none before that search.
    """
    workload, optimizer, _, large = place
    again = losses.get((workload, optimizer, large, large, "kept"))
    found = results[optimizer].get(large)
    return again or (found.losses if found else {})


def searches(workload: Workload, file: Path | None = None) -> Results:
    """What a search chose: one that is committed, or that of a user's file."""
    if file is None:
        return measured(workload, sweep.committed(workload))
    return measured(workload, read(sweep.table_of(workload, RUNS / file.stem), sweep.Row))


def committed_rows() -> list[Row]:
    """What was run, on any machine."""
    return [row for path in sorted(COMMITTED.glob("*/transfer.csv")) for row in read(path, Row)]


def law_table(
    workload: Workload,
    rows: list[Row],
    results: Results,
    pairs: Pairs = (),
    shown: Sequence[str] = SHOWN,
) -> str:
    """A line for each optimizer and pair: the search, and the difference of each way from it."""
    losses = losses_of(rows, workload)
    pairs = pairs or pairs_of(workload)
    order = workload.optimizers
    places = {place[:4] for place in losses if place[2:4] in pairs}
    lines = []
    for place in sorted(places, key=lambda x: (pairs.index(x[2:]), order.index(x[1]))):
        search = searched(losses, place, results)
        ways = [_over(losses.get((*place, way)), search) for way in shown]
        loss = f"{np.mean([*search.values()]):.3f}" if search else ""
        lines.append((" to ".join(place[2:]), f"`{place[1]}`", loss, *map(str, ways)))
    columns = zip(["batch", "optimizer", "search", *shown], *lines, strict=True)
    head, *cells = zip(*(column for column in columns if any(column[1:])), strict=True)
    return markdown(head, cells)


def floors_table(rows: list[Row], results: Results) -> str:
    """The differences on the BERT with each floor of the momentum, in the mean over optimizers."""
    losses = losses_of(rows, BERT)
    ways = ["floor 0", "floor 0.5", "floor 0.6", "law", "floor 0.8", "floor 0.9", "momentum kept"]
    lines: dict[float, list[list[float]]] = {}
    for place in dict.fromkeys(place[:4] for place in losses):
        search = searched(losses, place, results)
        found = [_over(losses.get((*place, way)), search) for way in ways]
        if all(found):
            growth = int(place[3]) / int(place[2])
            lines.setdefault(growth, []).append([x.mean for x in found])
    heads = [f"0.7, {way}" if way == "law" else way.removeprefix("floor ") for way in ways]
    cells = [
        [f"{growth:g}", str(len(own)), *(f"{np.mean(x):+.3f}" for x in zip(*own, strict=True))]
        for growth, own in sorted(lines.items())
    ]
    return markdown(["times the batch", "moves", *heads], cells)


def _over(found: dict[int, float] | None, search: dict[int, float]) -> Difference | str:
    return difference(found, search) if found and found.keys() == search.keys() else ""


def report(rows: list[Row], workloads: Iterable[Workload], file: Path | None = None) -> str:
    """The tables of each workload: losses over those of a search at the large batch."""
    parts = ["# What following the law costs", EXPLANATION]
    for workload in workloads:
        if any(row.workload == workload.name for row in rows):
            results = searches(workload, file)
            parts += [f"## {workload.title}", law_table(workload, rows, results)]
    if file is None:
        parts += ["## The floor of the momentum", floors_table(rows, searches(BERT))]
    return "\n\n".join(parts) + "\n"


EXPLANATION = """\
Written by `python -m benchmarks.transfer --report`. `search` is the test loss of a search at the
large batch, in the mean over its seeds. The others are losses over it, seed by seed: below 0 is
better than the search. In brackets is the interval of Student's distribution that holds 95%, which
covers seeds and not the choice of settings; in bold those whose interval leaves out 0."""


def main(arguments: list[str] | None = None) -> None:
    """Runs what is left, and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--file", type=Path, help="with workloads of your own, after their search")
    parser.add_argument("--workload", nargs="+", help="default: bert, or all of a file")
    parser.add_argument("--optimizer", nargs="+", help="default: all")
    parser.add_argument("--pair", nargs=2, action="append", metavar=("SMALL", "LARGE"))
    parser.add_argument("--way", nargs="+", choices=WAYS + ON_DEMAND, help="default: all")
    parser.add_argument("--seeds", type=int, help="default: all that the search has not seen")
    parser.add_argument("--keep", action="store_true", help="into benchmarks/results")
    parser.add_argument("--report", action="store_true", help="only the tables")
    args = parser.parse_args(arguments)
    args.way = args.way or (SHOWN if args.file else WAYS)
    workloads = workloads_in(args.file) if args.file else WORKLOADS
    folder_of = RUNS / args.file.stem if args.file else COMMITTED / folder() if args.keep else RUNS
    path = folder_of / "transfer.csv"
    if not args.report:
        names = args.workload or (workloads if args.file else ["bert"])
        run(args, [workloads[name] for name in names], path)
    rows = read(path, Row) if args.file else committed_rows()
    text = report(rows, workloads.values(), args.file)
    (path if args.file else COMMITTED / "transfer").with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
