"""Replays the recorded runs of other systems, and writes the table of `docs/parity.md`: minutes.

python docs/write_parity.py
"""

import json
from pathlib import Path
import re
import sys
from typing import NamedTuple

import jax

DOCS = Path(__file__).parent
PAGE = DOCS / "parity.md"
sys.path.insert(0, str(DOCS.parent))

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
    """The recorded runs of one optimizer of one system."""

    system: str
    optimizer: str
    dtype: str
    cases: int
    steps: int
    float32: float | None
    """The largest difference in float32; None where the recording is more precise."""
    float64: float

    def __str__(self) -> str:
        own = "-" if self.float32 is None else f"{self.float32:.1e}"
        return (
            f"| {self.system} | {self.optimizer} | {self.dtype} | {self.cases} | {self.steps} "
            f"| {own} | {self.float64:.1e} |"
        )


def recorded() -> dict[tuple[str, str], list[golden.Case]]:
    """The recorded runs by system and optimizer."""
    runs: dict[tuple[str, str], list[golden.Case]] = {}
    for peer in PEERS:
        about = json.loads((Path(golden.__file__).parent / f"{peer}.json").read_text())
        for case in golden.load(peer):
            own = about["cases"][case.name]
            if peer == "muon_peers":
                key = _of_muon(own["dialect"], about["dialects"][own["dialect"]], case.dtype)
            elif "dialect" in own:
                key = _of_repository(about["dialects"][own["dialect"]]["source"], case.dtype)
            else:
                key = _of_package(peer, own["optimizer"].split(" ")[0])
            runs.setdefault(key, []).append(case)
    return runs


def _of_package(peer: str, name: str) -> tuple[str, str]:
    keys = (f"{peer} {name}", name.partition(".")[0], peer)
    system = next(VERSIONS[key] for key in keys if key in VERSIONS)
    return system, name.rpartition(".")[2]


def _of_repository(source: str, dtype: str) -> tuple[str, str]:
    """Of `owner/name@commit path/of/file.py Class`; only TensorFlow 1 ran in float32."""
    repository, commit = source.split(" ")[0].split("@")
    system = "training repositories" + (", TensorFlow 1" if dtype == "float32" else "")
    return f"{system} ({repository}@{commit[:8]})", source.partition(" (")[0].split(" ")[-1]


def _of_muon(dialect: str, about: dict[str, str], dtype: str) -> tuple[str, str]:
    """Of `owner/name@commit path` or `package version`; NVIDIA ran in float32 without changes."""
    name, version = about["source"].split(" ")[:2]
    name, _, commit = name.partition("@")
    system = f"{name}@{commit[:8]}" if commit else f"{name} {version}"
    return system + (", as it is" if dtype == "float32" else ""), dialect


def measured(runs: dict[tuple[str, str], list[golden.Case]]) -> list[Row]:
    """The runs replayed."""
    rows = []
    for (system, optimizer), cases in runs.items():
        (dtype,) = {case.dtype for case in cases}
        steps = sum(len(jax.tree.leaves(case.trajectory)[0]) for case in cases)
        single = None
        if dtype == "float32":
            single = max(largest_difference(case, "float32") for case in cases)
        with jax.enable_x64(True):
            double = max(largest_difference(case, "float64") for case in cases)
        rows.append(Row(system, optimizer, dtype, len(cases), steps, single, double))
    return rows


def written(page: str, rows: list[Row]) -> str:
    """The page with these rows in its table."""
    begin, end = "<!-- parity: made by docs/write_parity.py -->", "<!-- end of parity -->"
    table = "\n".join(
        [
            "| System | Optimizer | recorded in | cases | steps | in float32 | in float64 |",
            "|---|---|---|---|---|---|---|",
            *map(str, rows),
        ]
    )
    between = re.compile(f"(?<={begin}\n).*?(?={end})", re.DOTALL)
    return between.sub(f"\n{table}\n\n", page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(), measured(recorded())))
