"""A table of finished runs that grows line by line, and survives being cut off."""

import csv
from pathlib import Path
from typing import Any, TypeVar

Line = TypeVar("Line", bound=tuple[Any, ...])


def read(path: Path, line: type[Line]) -> list[Line]:
    """The table, or nothing where there is none yet. A line that was cut off is cut out."""
    if not path.exists():
        return []
    text = path.read_text()
    if not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
        path.write_text(text)
    types = line.__annotations__
    return [
        line(**{name: types[name](value) for name, value in own.items()})
        for own in csv.DictReader(text.splitlines())
    ]


def append(path: Path, line: tuple[Any, ...]) -> None:
    """Writes a line, an instance of a NamedTuple; its fields are the head of the table."""
    begins = not path.exists() or path.stat().st_size == 0
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if begins:
            writer.writerow(type(line)._fields)
        writer.writerow(line)
