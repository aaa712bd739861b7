"""Writes the tables of `docs/evidence.md` from the committed trials.

python -m docs.write_evidence
"""

from pathlib import Path
import re

from benchmarks.batch_size_curve.report import tables
from benchmarks.batch_size_curve.sweep import read
from benchmarks.batch_size_curve.workloads import WORKLOADS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "evidence.md"
TRIALS = ROOT / "benchmarks" / "results" / "cpu-2-cores" / "batch_size_curve" / "trials.csv"


def written(page: str) -> str:
    """The page as it should be."""
    rows = read(TRIALS)
    for name, workload in WORKLOADS.items():
        begin, end = f"<!-- {name}: made by docs/write_evidence.py -->", f"<!-- end of {name} -->"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise ValueError(f"page must have one {begin!r} and one {end!r}.")
        between = re.compile(f"(?<={re.escape(begin)}\n).*?(?={re.escape(end)})", re.DOTALL)
        made = f"\n{tables(workload, rows)}\n\n"
        page = between.sub(lambda match, made=made: made, page)
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
