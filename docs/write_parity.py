"""Replays the recorded runs of other systems, and writes the table of `docs/parity.md`: minutes.

python docs/write_parity.py
"""

import itertools
import json
from pathlib import Path
import sys
from typing import NamedTuple

import jax

DOCS = Path(__file__).parent
PAGE = DOCS / "parity.md"
sys.path.insert(0, str(DOCS.parent))

from benchmarks.harness.pages import with_table  # noqa: E402
from tests import golden  # noqa: E402
from tests.golden import PEERS  # noqa: E402
from tests.test_golden import largest_difference  # noqa: E402

VERSIONS = {
    "mxnet_2_0_0b1": "MXNet 2.0.0b1",
    "mxnet_1_9_1": "MXNet 1.9.1",
    "timm": "timm 1.0.31",
    "pytorch_optimizer": "pytorch_optimizer 4.1.0",
    "tensorflow_addons": "TensorFlow Addons 0.19",
    "LAMBOptimizer": "BERT-style TF1 script",
    "keras": "Keras 3.15.1",
    "icefall": "icefall (July 2022)",
    "icefall ScaledAdam": "icefall (current)",
    "icefall LearnedGradient": "icefall (corrected)",
}
"""What the columns call a system, by the beginning of its optimizer's name or by its file."""


class Row(NamedTuple):
    """The recorded runs of one system in one precision."""

    system: str
    dtype: str
    runs: dict[str, int]
    """How many there are of each optimizer."""
    difference: float
    """The largest, replayed in that precision."""

    def __str__(self) -> str:
        runs = ", ".join(f"{name} {count}" for name, count in self.runs.items())
        return f"| {self.system} | {self.dtype} | {runs} | {self.difference:.1e} |"


Runs = dict[tuple[str, str], dict[str, list[golden.Case]]]


def recorded() -> Runs:
    """The recorded runs by system and precision, and then by optimizer."""
    runs: Runs = {}
    for peer in PEERS:
        about = json.loads((Path(golden.__file__).parent / f"{peer}.json").read_text())
        for case in golden.load(peer):
            own = about["cases"][case.name]
            if peer == "muon_peers":
                system, optimizer = _of_muon(own["dialect"], about["dialects"][own["dialect"]])
            elif "dialect" in own:
                system, optimizer = _of_repository(about["dialects"][own["dialect"]]["source"])
            else:
                system, optimizer = _of_package(peer, own["optimizer"].split(" ")[0])
            cases = runs.setdefault((system, case.dtype), {})
            cases.setdefault(optimizer, []).append(case)
    return runs


def _of_package(peer: str, name: str) -> tuple[str, str]:
    keys = (f"{peer} {name}", name.partition(".")[0], peer)
    system = next(VERSIONS[key] for key in keys if key in VERSIONS)
    return system, name.rpartition(".")[2]


def _of_repository(source: str) -> tuple[str, str]:
    """Of `owner/name@commit path/of/file.py Class`."""
    repository, commit = source.split(" ")[0].split("@")
    return f"{repository}@{commit[:8]}", source.partition(" (")[0].split(" ")[-1]


def _of_muon(dialect: str, about: dict[str, str]) -> tuple[str, str]:
    """Of `owner/name@commit path` or `package version`."""
    name, version = about["source"].split(" ")[:2]
    name, _, commit = name.partition("@")
    return f"{name}@{commit[:8]}" if commit else f"{name} {version}", dialect


def measured(runs: Runs) -> list[Row]:
    """The runs replayed."""
    rows = []
    for (system, dtype), optimizers in runs.items():
        with jax.enable_x64(dtype == "float64"):
            cases = itertools.chain.from_iterable(optimizers.values())
            largest = max(largest_difference(case, dtype).size for case in cases)
        counts = {name: len(own) for name, own in optimizers.items()}
        rows.append(Row(system, dtype, counts, largest))
    return rows


def written(page: str, rows: list[Row]) -> str:
    """The page with these rows in its table."""
    head = ["| System | recorded in | runs of | largest difference |", "|---|---|---|---|"]
    lines = "\n".join([*head, *map(str, rows)])
    return with_table(page, "parity", "docs/write_parity.py", lines)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(), measured(recorded())))
