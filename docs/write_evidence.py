"""Writes the tables that pages and the README have from the committed trials.

python -m docs.write_evidence
"""

from collections.abc import Callable, Mapping
import functools
from pathlib import Path
import re

from benchmarks import changed_run, transfer, zeros
from benchmarks.harness.pages import markdown, with_tables
from benchmarks.harness.results import COMMITTED, read
from benchmarks.tuned.intervals import Difference, difference
from benchmarks.tuned.results import Results, measured
from benchmarks.tuned.sweep import committed
from benchmarks.tuned.tables import losses_table, ramps_table
from benchmarks.tuned.workloads import WORKLOADS, Workload

ROOT = Path(__file__).parents[1]
MOVES = (("32", "512"), ("32", "2048"), ("128", "2048"))
OPTIMIZERS = ("adamw", "lamb", "lans", "muon", "muonh")


def tuned(name: str) -> tuple[Workload, Results]:
    """A workload, and the results of its complete cells."""
    workload = WORKLOADS[name]
    return workload, measured(workload, committed(workload))


def tuned_table(name: str) -> str:
    """The test losses of the optimizers at four batch sizes."""
    workload, results = tuned(name)
    return losses_table(workload, {own: results[own] for own in OPTIMIZERS})


def momentum_table(name: str) -> str:
    """What the best trial with a momentum above 0.9 loses more than the best of all trials."""
    workload, results = tuned(name)
    lines = []
    for optimizer in OPTIMIZERS:
        cells = [results[optimizer][batches].searched for batches in workload.plans]
        lost = [
            min(loss for own, loss in cell.items() if own.momentum > 0.9) - min(cell.values())
            for cell in cells
        ]
        lines.append([f"`{optimizer}`", *(f"{loss:.3f}" for loss in lost)])
    return markdown(["optimizer", *workload.plans], lines)


def lead(results: Results, name: str, batches: str) -> dict[int, float]:
    """What MuonH is ahead of an optimizer, by seed."""
    ahead, behind = results["muonh"][batches].losses, results[name][batches].losses
    return {seed: behind[seed] - ahead[seed] for seed in ahead}


def growth(name: str, optimizer: str) -> Difference:
    """How much larger that lead is at the largest batch than at the smallest, seed by seed."""
    workload, results = tuned(name)
    smallest, *_, largest = workload.plans
    return difference(lead(results, optimizer, largest), lead(results, optimizer, smallest))


def gap_table() -> str:
    """What others lose more than MuonH on the BERT at each batch size, and how that grows."""
    workload, results = tuned("bert")
    smallest, *_, largest = workload.plans
    heads = ["minus `muonh`", *workload.plans, f"{largest} less {smallest}"]
    lines = []
    for optimizer in OPTIMIZERS[:-1]:
        leads = (
            difference(results[optimizer][batches].losses, results["muonh"][batches].losses)
            for batches in workload.plans
        )
        lines.append([f"`{optimizer}`", *map(str, leads), str(growth("bert", optimizer))])
    return markdown(heads, lines)


def law_table(name: str) -> str:
    """What settings that a law moves to a larger batch lose, compared with a search there."""
    workload, results = tuned(name)
    ways = ("law", "sqrt", "kept")
    return transfer.law_table(workload, transfer.committed_rows(), results, MOVES, ways)


def zeros_table(kind: str) -> str:
    """What matrices that start at zero lose, by who moves them."""
    rows = read(COMMITTED / "cpu-2-cores" / "zeros.csv", zeros.Row)
    return zeros.table(rows, [case for case in zeros.CASES if re.match(kind, case)])


def changes_table(name: str) -> str:
    """What a run has by a change at its half."""
    rows = read(COMMITTED / "cpu-2-cores" / "changed_run.csv", changed_run.Row)
    return changed_run.table(rows, changed_run.TABLES[name])


PAGES: dict[Path, dict[str, Callable[[], str]]] = {
    ROOT / "docs" / "evidence.md": {
        "tuned": functools.partial(tuned_table, "bert"),
        "gap": gap_table,
        "momentum": functools.partial(momentum_table, "bert"),
        "causal": functools.partial(tuned_table, "causal"),
        "law": functools.partial(law_table, "bert"),
        "floors": lambda: transfer.floors_table(transfer.committed_rows(), tuned("bert")[1]),
        "ramp": lambda: ramps_table(*tuned("bert_ramp")),
    },
    ROOT / "docs" / "details" / "how_it_was_measured.md": {
        "law_causal": functools.partial(law_table, "causal"),
    },
    ROOT / "docs" / "algorithms" / "muonh.md": {
        "zeros": functools.partial(zeros_table, ".* 512"),
    },
    ROOT / "docs" / "guides" / "changing_a_run.md": {
        "losses": functools.partial(changes_table, "losses")
    },
    ROOT / "docs" / "index.md": {"tuned": functools.partial(tuned_table, "bert")},
}


def written(page: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """The page as it should be."""
    return with_tables(page, "docs/write_evidence.py", tables)


if __name__ == "__main__":
    for path, tables in PAGES.items():
        path.write_text(written(path.read_text(), tables))
