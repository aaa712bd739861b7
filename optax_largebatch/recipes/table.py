"""The recipes as a catalogue."""

import dataclasses
import textwrap
from typing import NamedTuple

from optax_largebatch.recipes.published import FIELDS, Entry, names, published, rows

WIDTH = 80
INDENT = "    "


class Line(NamedTuple):
    """A recipe in the catalogue. A field is empty if the source does not say it."""

    name: str
    batch_sizes: str
    epochs: str
    result: str
    not_said: str
    """The settings that `get` must be given."""
    source: str


@dataclasses.dataclass(frozen=True)
class Catalogue:
    """The result of `table`: print it, or read its `fields`."""

    fields: dict[str, tuple[Line, ...]]
    """The lines of each field."""

    def __str__(self) -> str:
        text = []
        for field, lines in self.fields.items():
            text.append(field.upper())
            for line in lines:
                said = textwrap.wrap(_said(line), WIDTH - len(INDENT))
                text += [line.name, *(INDENT + part for part in said)]
            text.append("")
        return "\n".join([*text, "Sources: recipes.table().fields, and in each recipe."])


def table(part: str | None = None) -> Catalogue:
    """A table of the recipes by field, with batch sizes, results and sources.

    Args:
        part: as for `names`.

    Returns:
        The catalogue, to be printed. A cell that no source backs is empty.

    Raises:
        ValueError: there is no such name or field.

    Examples:
        >>> from optax_largebatch import recipes
        >>> for line in recipes.table("byol").fields["self-supervised vision"]:
        ...     print(line.name, line.batch_sizes, line.epochs)
        resnet50/lars/byol 4096 40, 100, 300, 1000
    """
    chosen = names(part)
    found = {}
    for field in FIELDS.values():
        lines = tuple(
            _line(name, published()[name]) for name in chosen if published()[name]["field"] == field
        )
        if lines:
            found[field] = lines
    return Catalogue(found)


def _line(name: str, entry: Entry) -> Line:
    runs = rows(entry)
    return Line(
        name,
        _batch_sizes(runs),
        _listed([run.get("epochs") for run in runs]),
        entry.get("result") or _results(runs),
        ", ".join(entry.get("not_said", ())),
        entry["source"],
    )


def _results(runs: list[Entry]) -> str:
    """The results; if there are several, each with the setting in which its run differs."""
    having = [run for run in runs if "result" in run]
    if len(runs) < 2:
        return "".join(run["result"] for run in having)
    by_batch = len({run.get("batch_size") for run in having}) > 1
    return "; ".join(
        f"{run['batch_size'] if by_batch else run['epochs']}: {run['result']}" for run in having
    )


def _batch_sizes(runs: list[Entry]) -> str:
    sizes = _listed([run.get("batch_size") for run in runs])
    lengths = {run.get("sequence_length") for run in runs} - {None}
    return f"{sizes} x {_listed(list(lengths))} tokens" if lengths else sizes


def _listed(values: list[int | None]) -> str:
    known = sorted({value for value in values if value is not None})
    if len(known) > 7:
        return f"{len(known)} from {known[0]} to {known[-1]}"
    return ", ".join(map(str, known))


def _said(line: Line) -> str:
    """What the source says of a recipe, in a sentence."""
    cells = {
        "batch size": line.batch_sizes,
        "epochs": line.epochs,
        "reached": line.result,
        "to be given:": line.not_said,
    }
    return "; ".join(f"{name} {cell}" for name, cell in cells.items() if cell)
