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
from tests.test_golden import PEERS, largest_difference  # noqa: E402

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
        about = json.loads((Path(golden.__file__).parent / f"{peer}.json").read_text())["cases"]
        for case in golden.load(peer):
            name = about[case.name]["optimizer"].split(" ")[0]
            keys = (f"{peer} {name}", name.partition(".")[0], peer)
            system = next(VERSIONS[key] for key in keys if key in VERSIONS)
            runs.setdefault((system, name.rpartition(".")[2]), []).append(case)
    return runs


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
