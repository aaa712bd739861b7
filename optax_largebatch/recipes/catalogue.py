"""The published settings as their sources give them, and their table."""

from collections.abc import Container, Iterator
import difflib
import functools
from importlib import resources
import json
import re
import textwrap
from typing import Any, NamedTuple

from optax_largebatch.arguments import check_choice
from optax_largebatch.plans.counts import count, written
from optax_largebatch.plans.stages import starts_of

FIELDS = ("language", "supervised vision", "self-supervised vision", "speech", "ramps")
"""The files in `published`, with "_" for spaces. Ramps are batch sizes that grew."""

WIDTH = 80
SPELLED_ALIKE = 0.75
"""How much of a word that nobody knows must be in one that is known."""
MOST_NEAR = 6
"""The most names that an error says are near."""

Entry = dict[str, Any]
"""A recipe in its file: the settings of all runs, and `points`, one for each run. Or a ramp.

`also` has other names that people type, and `near` names of what it is not, but resembles.
"""


class Line(NamedTuple):
    """A recipe or a ramp in the table. A field is empty if the source does not say it."""

    field: str
    name: str
    batch_sizes: str
    length: str
    """The epochs of a recipe; of a ramp, where its last batch size begins."""
    result: str
    not_said: str
    """The settings that `get` or `ramp` must be given."""


def names(part: str | None = None) -> list[str]:
    """The names of the recipes, for `get`, and of the ramps, for `ramp`.

    Args:
        part: the beginnings of words that the names must have, such as `"lars"`, `"resnet"` or
            `"bert lans"`, or a field: `"language"`, `"supervised vision"`,
            `"self-supervised vision"`, `"speech"` or `"ramps"`. None for all.

    Returns:
        The names, in alphabetical order.

    Raises:
        ValueError: there is no such name or field.

    Examples:
        >>> from optax_largebatch import recipes
        >>> print(recipes.names()[:2])
        ['albert/lamb/google', 'bart/lamb/nvidia-phase1']
        >>> print(recipes.names("speech"))
        ['fastpitch/lamb/nvidia', 'rnnt/lamb/mlperf', 'zipformer/scaled_adam/icefall']
    """
    chosen = _having(part or "")
    if not chosen:
        raise ValueError(
            f"part must be a field ({', '.join(FIELDS)}) or the beginning of a word of a "
            f"name, such as 'lars'; got {part!r}. recipes.table() has all names."
        )
    return chosen


def table(part: str | None = None) -> str:
    """A table of the recipes by field, with batch sizes, results and what sources leave open.

    Args:
        part: as for `names`.

    Returns:
        The table, to be printed; at most 80 columns wide.

    Raises:
        ValueError: there is no such name or field.

    Examples:
        >>> from optax_largebatch import recipes
        >>> print(recipes.table("byol"))
        SELF-SUPERVISED VISION
        resnet50/lars/byol
            batch size 4096; epochs 40, 100, 300, 1000; reached 1000: 74.3% top-1
    """
    text: list[str] = []
    for field in FIELDS:
        in_field = [line for line in lines(part) if line.field == field]
        text += ["", field.upper()] if in_field else []
        for line in in_field:
            cells = {
                "batch size": line.batch_sizes,
                "the last from" if field == "ramps" else "epochs": line.length,
                "reached": line.result,
                "to be given:": line.not_said,
            }
            said = "; ".join(f"{name} {cell}" for name, cell in cells.items() if cell)
            text += [line.name, textwrap.indent(textwrap.fill(said, WIDTH - 4), " " * 4)]
    return "\n".join(text[1:])


def batch_sizes(name: str) -> list[int]:
    """The batch sizes at which a recipe was published.

    Args:
        name: a name, or words that no other has, as for `get`.

    Returns:
        The batch sizes, in ascending order; none for a ramp, or if the source gives only a rule.

    Raises:
        ValueError: there is no such recipe.

    Examples:
        >>> from optax_largebatch import recipes
        >>> print(recipes.batch_sizes("resnet50/lars/square-root"))
        [512, 1024, 4096, 8192]
    """
    return different(rows(find(name)), "batch_size")


def examples_to_target(name: str) -> dict[int, list[int]]:
    """The examples that each reference run of a recipe needed to reach its benchmark's target.

    Args:
        name: a recipe of MLPerf; other sources did not publish single runs.

    Returns:
        The examples that each run saw, by batch size.

    Raises:
        ValueError: there are no such runs.

    Examples:
        >>> from optax_largebatch import recipes
        >>> print(recipes.examples_to_target("bert-large/lamb/mlperf")[8192][:3])
        [4251648, 4153344, 4055040]
    """
    recorded = _load("runs.json")
    check_choice("name", name, sorted(recorded))
    unit = published()[name]["examples"] if recorded[name]["unit"] == "epochs" else 1
    runs = recorded[name]["runs"]
    return {int(batch): [unit * length for length in runs[batch]] for batch in runs}


@functools.cache
def published() -> dict[str, Entry]:
    """All entries by name."""
    return {
        name: {"not_said": [], **entry, "name": name, "field": field}
        for field in FIELDS
        for name, entry in _load(f"published/{field.replace(' ', '_')}.json").items()
    }


def rows(entry: Entry) -> list[Entry]:
    """The runs of a recipe, each with the settings that all runs share; none for a ramp."""
    return [entry["common"] | point for point in entry.get("points", ())]


def different(runs: list[Entry], key: str) -> list[Any]:
    """The values that a setting has in those of the runs that have it, in ascending order."""
    return sorted({run[key] for run in runs if key in run})


def find(text: str, batch_size: int | None = None) -> Entry:
    """A recipe or ramp, from words that people call it by.

    Args:
        text: its name, another name in `also`, or words of these that no other entry has.
        batch_size: what chooses among several, if it is given.
    """
    having = _having(text)
    words = _words(text)
    for fits in (
        lambda name: words in _names_of(name),
        lambda name: all(word in _words_of(name) for word in words),
        lambda name: batch_size in batch_sizes(name),
    ):
        if len(having) > 1:
            having = list(filter(fits, having)) or having
    if len(having) == 1:
        return published()[having[0]]
    near = having or _near(words)
    raise ValueError(
        f"name must be that of a recipe or ramp, or words that no other has; got {text!r}. "
        f"{'It is a part of' if having else 'Near it are'} {', '.join(near) or 'none'}; "
        f"recipes.table() has all names."
    )


def check_said(entry: Entry, given: Container[str]) -> None:
    """Checks that all is given that the source does not say."""
    if missing := [key for key in entry["not_said"] if key not in given]:
        units = f" Note that {entry['units']}." if "units" in entry else ""
        raise ValueError(
            f"{' and '.join(missing)} must be given for {entry['name']!r}: its source does not say "
            f"{'it' if len(missing) == 1 else 'them'}, and nothing is filled in.{units} The source "
            f"is {entry['source']}."
        )


def lines(part: str | None = None) -> Iterator[Line]:
    """What the table has of each recipe and ramp; `part` is as for `names`."""
    for name in names(part):
        entry = published()[name]
        cells = _cells_of_ramp(entry) if entry["field"] == "ramps" else _cells(rows(entry))
        yield Line(entry["field"], name, *cells, ", ".join(entry["not_said"]))


def _having(text: str) -> list[str]:
    """The entry of this name, or those of this field, or with words that begin as these do."""
    entries = published()
    if text in entries:
        return [text]
    of_field = [name for name, entry in entries.items() if entry["field"] == text]
    words = _words(text)
    return sorted(of_field or (name for name in entries if all(_begun(words, _words_of(name)))))


def _near(words: list[str]) -> list[str]:
    """Entries that have most of the words, in all that is said of them; or words spelled alike."""
    known = {
        name: [*_words_of(name), *_words(" ".join([*entry.get("near", ()), entry["task"]]))]
        for name, entry in published().items()
    }
    having = {name: sum(_begun(words, of_entry)) for name, of_entry in known.items()}
    if most := max(having.values()):
        return [name for name, number in having.items() if number == most][:MOST_NEAR]
    vocabulary = sorted({word for of_entry in known.values() for word in of_entry})
    alike = {
        x for word in words for x in difflib.get_close_matches(word, vocabulary, 1, SPELLED_ALIKE)
    }
    return [name for name, of_entry in known.items() if alike & {*of_entry}][:MOST_NEAR]


def _begun(words: list[str], known: list[str]) -> list[bool]:
    """Whether each word is the beginning of a known one."""
    return [any(x.startswith(word) for x in known) for word in words]


def _names_of(name: str) -> list[list[str]]:
    """What an entry is called: the words of each part of its name, and of its other names."""
    return [_words(x) for x in (*name.split("/"), *published()[name].get("also", ()))]


def _words_of(name: str) -> list[str]:
    return [word for words in _names_of(name) for word in words]


def _words(text: str) -> list[str]:
    return re.findall(r"[^\s/.-]+", str(text).lower())


def _cells(runs: list[Entry]) -> tuple[str, str, str]:
    """Batch sizes, epochs and results of a recipe."""
    sizes, lengths, epochs = (
        _listed(different(runs, key)) for key in ("batch_size", "sequence_length", "epochs")
    )
    sizes += f" x {lengths} tokens" if lengths and sizes else ""
    return sizes, epochs, _results(runs)


def _cells_of_ramp(entry: Entry) -> tuple[str, str, str]:
    """Batch sizes of a ramp, where the last one begins, and no result."""
    if linear := entry.get("linear"):
        step = f" by {linear['increment']}" if "increment" in linear else ""
        sizes = f"{linear['first']} to {linear['last']}{step}"
        last = linear["length"]
    else:
        starts = starts_of(entry["stages"])
        sizes = _listed([batch for _, batch in starts])
        last = starts[-1][0]
    total = f" of {written(count('total', entry['total']))}" if "total" in entry else ""
    length = f"{written(count('length', last))}{total} {entry.get('counted_in', 'tokens')}"
    return f"{sizes} x {entry['sequence_length']} tokens", length, ""


def _results(runs: list[Entry]) -> str:
    """The results; if they differ, each with the setting in which its run differs."""
    if len({run.get("result") for run in runs}) == 1:
        return runs[0].get("result", "")
    having = [run for run in runs if "result" in run]
    key = "batch_size" if len(different(having, "batch_size")) > 1 else "epochs"
    return "; ".join(f"{run[key]}: {run['result']}" for run in having)


def _listed(values: list[Any]) -> str:
    if len(values) > 7:
        return f"{len(values)} from {values[0]} to {values[-1]}"
    return ", ".join(map(str, values))


def _load(file: str) -> dict[str, Any]:
    return json.loads(resources.files("optax_largebatch.recipes").joinpath(file).read_text())
