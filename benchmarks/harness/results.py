"""Where results go, and how they are written.

Those that are committed lie in `benchmarks/results`, by machine; everything else in `runs`.
"""

import argparse
from collections.abc import Mapping, Sequence
import csv
from pathlib import Path
from typing import Any, TypeVar

RUNS = Path("runs")
COMMITTED = Path(__file__).parents[1] / "results"

Row = TypeVar("Row", bound=tuple[Any, ...])


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


def report(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes the rows, and prints them as a table."""
    write_csv(rows, path)
    lines = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(map(str.ljust, line, widths)).rstrip())


def read(path: Path, row: type[Row]) -> list[Row]:
    """The rows of a table, instances of a NamedTuple; a line that was cut off is cut out.

    A table that is not there yet has none.
    """
    if not path.exists():
        return []
    text = path.read_text()
    if not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
        path.write_text(text)
    types = row.__annotations__
    return [
        row(**{name: types[name](value) for name, value in line.items()})
        for line in csv.DictReader(text.splitlines())
    ]


def append(path: Path, row: tuple[Any, ...]) -> None:
    """Adds a row, an instance of a NamedTuple, to a table that survives being cut off."""
    begins = not path.exists() or path.stat().st_size == 0
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if begins:
            writer.writerow(type(row)._fields)
        writer.writerow(row)
