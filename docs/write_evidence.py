"""Writes the tables of `docs/evidence.md` and that of the README from the committed trials.

python -m docs.write_evidence
"""

from collections.abc import Callable
import functools
from pathlib import Path
import re

from benchmarks.batch_size_curve.report import measured, steps_column, tables
from benchmarks.batch_size_curve.sweep import read
from benchmarks.batch_size_curve.workloads import FIRST, WORKLOADS

ROOT = Path(__file__).parents[1]
TRIALS = ROOT / "benchmarks" / "results" / "cpu-2-cores" / "batch_size_curve" / "trials.csv"
SHORT = {"digits": (16, 128, 1024), "bert": (32, 512, 2048)}  # the columns of the README


def full_tables(name: str) -> str:
    """The tables of the report."""
    return tables(WORKLOADS[name], read(TRIALS))


def short_table() -> str:
    """Some optimizers at some batch sizes."""
    rows = read(TRIALS)
    columns = {
        f"{name}, batch {size}": steps_column(measured(WORKLOADS[name], rows), size)
        for name, sizes in SHORT.items()
        for size in sizes
    }
    lines = [f"| | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for optimizer in FIRST:
        texts = [column[optimizer] for column in columns.values()]
        lines.append(f"| `{optimizer}` | {' | '.join(texts)} |")
    return "\n".join(lines)


PAGES: dict[Path, dict[str, Callable[[], str]]] = {
    ROOT / "docs" / "evidence.md": {
        name: functools.partial(full_tables, name) for name in WORKLOADS
    },
    ROOT / "README.md": {"evidence": short_table},
}


def written(path: Path, page: str) -> str:
    """The page as it should be."""
    for name, table in PAGES[path].items():
        begin, end = f"<!-- {name}: made by docs/write_evidence.py -->", f"<!-- end of {name} -->"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise ValueError(f"{path.name} must have one {begin!r} and one {end!r}.")
        between = re.compile(f"(?<={re.escape(begin)}\n).*?(?={re.escape(end)})", re.DOTALL)
        made = f"\n{table()}\n\n"
        page = between.sub(lambda match, made=made: made, page)
    return page


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(written(path, path.read_text()))
