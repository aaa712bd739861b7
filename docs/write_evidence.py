"""Writes the tables that pages and the README have from the committed trials.

python -m docs.write_evidence
"""

from collections.abc import Callable
import functools
from pathlib import Path

from benchmarks.harness.table import read
from benchmarks.harness.tables import written as with_table
from benchmarks.tuned.intervals import Difference, difference
from benchmarks.tuned.results import Results, measured
from benchmarks.tuned.search import Settings
from benchmarks.tuned.sweep import Row, table_of
from benchmarks.tuned.tables import (
    differences_table,
    losses_table,
    ramps_table,
    settings_table,
    table,
)
from benchmarks.tuned.workloads import ON_A_CPU, REFERENCES, WORKLOADS, Workload

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "cpu-2-cores" / "tuned"
# The rows of the table on the first screen.
SHORT = ("adamw", "lamb", "lans", "muon", "muonh")
NETWORKS = ("bert", "causal")


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


def gap_table(name: str) -> str:
    """What others lose more than MuonH at each batch size, and how that grows."""
    workload, results = tuned(name)
    smallest, *_, largest = workload.plans
    heads = ["minus `muonh`", *workload.plans, f"{largest} less {smallest}"]
    lines = []
    for optimizer in SHORT[:-1]:
        leads = (
            difference(results[optimizer][own].losses, results["muonh"][own].losses)
            for own in workload.plans
        )
        lines.append([f"`{optimizer}`", *map(str, leads), str(growth(name, optimizer))])
    return table(heads, lines)


def losses(name: str) -> str:
    """The test losses of all optimizers of a workload."""
    return losses_table(*tuned(name))


def differences(name: str, reference: str) -> str:
    """What every optimizer of a workload loses more than one of them."""
    return differences_table(*tuned(name), reference)


def settings_of(name: str) -> str:
    """The chosen settings of a workload, and the loss with every new seed."""
    return settings_table(tuned(name)[1])


def rates_table() -> str:
    """The chosen settings of the same at the smallest batch size, a middle one and the largest."""
    _, results = tuned("bert")
    shown = ("32", "512", "2048")
    heads = ["rate and decay", *(f"batch {own}" for own in shown)]
    lines = [
        [f"`{name}`", *(_rate_and_decay(results[name][own].settings) for own in shown)]
        for name in reversed(SHORT)
    ]
    return table(heads, lines)


def _rate_and_decay(own: Settings) -> str:
    decay = f"{own.weight_decay:.2g}" if own.weight_decay else "none"
    return f"{own.learning_rate:.2g}, {decay}"


PAGES: dict[Path, dict[str, Callable[[], str]]] = {
    ROOT / "docs" / "evidence.md": {
        "tuned": functools.partial(short_table, "bert"),
        "gap": functools.partial(gap_table, "bert"),
        "causal": functools.partial(short_table, "causal"),
        "causal gap": functools.partial(gap_table, "causal"),
        "ramp": lambda: ramps_table(*tuned("bert_ramp")),
    },
    ROOT / "docs" / "details" / "tuned.md": {
        **{name: functools.partial(losses, name) for name in NETWORKS},
        **{
            f"{name}, minus {reference}": functools.partial(differences, name, reference)
            for name in NETWORKS
            for reference in REFERENCES
        },
        "causal_ramp": lambda: ramps_table(*tuned("causal_ramp")),
        **{f"{name}, settings": functools.partial(settings_of, name) for name in ON_A_CPU},
    },
    ROOT / "docs" / "guides" / "from_adamw_to_16k.md": {"small_rates": rates_table},
    ROOT / "README.md": {"tuned": functools.partial(short_table, "bert")},
}


def written(path: Path, page: str) -> str:
    """The page as it should be."""
    for name, make in PAGES[path].items():
        page = with_table(page, name, "docs/write_evidence.py", make())
    return page


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(written(path, path.read_text()))
