"""Writes the tables that pages and the README have from the committed trials.

python -m docs.write_evidence
"""

from collections.abc import Callable, Mapping
import functools
from pathlib import Path

from benchmarks import fused_heads, transfer
from benchmarks.harness.pages import markdown, with_tables
from benchmarks.harness.results import read
from benchmarks.tuned.intervals import Difference, difference
from benchmarks.tuned.results import Results, measured
from benchmarks.tuned.sweep import Row, table_of
from benchmarks.tuned.tables import losses_table, ramps_table
from benchmarks.tuned.workloads import WORKLOADS, Workload

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "cpu-2-cores" / "tuned"
# The rows of the table on the first screen.
SHORT = ("adamw", "lamb", "lans", "muon", "muonh")


def tuned(name: str) -> tuple[Workload, Results]:
    """A workload, and the results of its complete cells."""
    workload = WORKLOADS[name]
    return workload, measured(workload, read(table_of(workload, RESULTS), Row))


def short_table(name: str) -> str:
    """The test losses of five optimizers at four batch sizes."""
    workload, results = tuned(name)
    return losses_table(workload, {own: results[own] for own in SHORT})


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
    for optimizer in SHORT[:-1]:
        leads = (
            difference(results[optimizer][batches].losses, results["muonh"][batches].losses)
            for batches in workload.plans
        )
        lines.append([f"`{optimizer}`", *map(str, leads), str(growth("bert", optimizer))])
    return markdown(heads, lines)


def law_table(name: str) -> str:
    """What settings that a law moves to a larger batch lose, compared with a search there."""
    workload, results = tuned(name)
    rows = read(RESULTS.parent / "transfer.csv", transfer.Row)
    return transfer.law_table(workload, rows, results)


PAGES: dict[Path, dict[str, Callable[[], str]]] = {
    ROOT / "docs" / "evidence.md": {
        "tuned": functools.partial(short_table, "bert"),
        "gap": gap_table,
        "causal": functools.partial(short_table, "causal"),
        "law": functools.partial(law_table, "bert"),
        "ramp": lambda: ramps_table(*tuned("bert_ramp")),
    },
    ROOT / "docs" / "algorithms" / "muon.md": {
        "fused": lambda: fused_heads.table(
            read(RESULTS.parent / "fused_heads.csv", fused_heads.Row)
        )
    },
    ROOT / "docs" / "index.md": {"tuned": functools.partial(short_table, "bert")},
}


def written(page: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """The page as it should be."""
    return with_tables(page, "docs/write_evidence.py", tables)


if __name__ == "__main__":
    for path, tables in PAGES.items():
        path.write_text(written(path.read_text(), tables))
