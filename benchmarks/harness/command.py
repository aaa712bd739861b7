"""The command of a benchmark whose runs are lines of one table."""

import argparse
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness.machine import folder
from benchmarks.harness.results import COMMITTED, RUNS


def run_and_show(
    name: str, about: str, run: Callable[[Path], None], show: Callable[[Path], str]
) -> None:
    """Runs what is left of the table of this name, unless `--report`, and prints what it says."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("--keep", action="store_true", help="into benchmarks/results")
    parser.add_argument("--report", action="store_true", help="only the table")
    args = parser.parse_args()
    path = (COMMITTED / folder() if args.keep or args.report else RUNS) / f"{name}.csv"
    if not args.report:
        run(path)
    print(show(path))
