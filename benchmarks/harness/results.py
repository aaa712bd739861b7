"""Where results go, and how they are written.

Those that are committed lie in `benchmarks/results`, by machine; everything else in `runs`.
"""

import argparse
from collections.abc import Mapping, Sequence
import csv
from pathlib import Path
from typing import Any

RUNS = Path("runs")
COMMITTED = Path(__file__).parents[1] / "results"


def add_output(parser: argparse.ArgumentParser, name: str) -> None:
    """The option that says where the results of this benchmark go."""
    parser.add_argument("--output", type=Path, default=RUNS / name, help="default: %(default)s")


def write_csv(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """One line for each row; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
