"""The published settings as their sources give them, one file for each field."""

import difflib
import functools
from importlib import resources
import json
from typing import Any

from optax_largebatch.arguments import check_choice

FIELDS = {
    "language": "language",
    "supervised_vision": "supervised vision",
    "self_supervised_vision": "self-supervised vision",
    "speech": "speech",
}
"""The files in `published`, with the names of their fields."""

FAMILIES = {"muonh": ("muon",)}
"""The words by which an algorithm is found, too."""

Entry = dict[str, Any]
"""A recipe in its file: the settings of all runs, and `points`, one for each run."""


def names(part: str | None = None) -> list[str]:
    """The names of the recipes, for `get`.

    Args:
        part: a word that the names must have, such as `"lars"`, `"resnet50"` or `"byol"` (`"muon"`
            finds MuonH, too), or a field: `"language"`, `"supervised vision"`, `"self-supervised
            vision"` or `"speech"`. None for all.

    Returns:
        The names, in alphabetical order.

    Raises:
        ValueError: there is no such name or field.

    Examples:
        >>> from optax_largebatch import recipes
        >>> print(recipes.names()[:2])
        ['albert/lamb/google', 'bart/lamb/nvidia-phase1']
        >>> print(recipes.names("speech"))
        ['fastpitch/lamb/nvidia', 'rnnt/lamb/mlperf']
    """
    entries = published()
    if part is None:
        return sorted(entries)
    chosen = [
        name
        for name, entry in entries.items()
        if part in (name, entry["field"], *_words(name, entry["algorithm"]))
    ]
    if not chosen:
        raise ValueError(
            f"part must be a field ({', '.join(FIELDS.values())}) or a word of a recipe's name, "
            f"such as 'lars'; got {part!r}. recipes.table() prints them all."
        )
    return sorted(chosen)


def batch_sizes(name: str) -> list[int]:
    """The batch sizes at which a recipe was published.

    Args:
        name: a name, or a part that no other name has, as for `get`.

    Returns:
        The batch sizes, in ascending order; none where the source gives only a rule.

    Raises:
        ValueError: there is no such recipe.

    Examples:
        >>> from optax_largebatch import recipes
        >>> print(recipes.batch_sizes("resnet50/lars/square-root"))
        [512, 1024, 4096, 8192]
    """
    own = rows(published()[full_name(name)])
    return sorted({row["batch_size"] for row in own if "batch_size" in row})


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
    check_choice("name", name, sorted(_load("runs.json")))
    unit = published()[name]["examples"] if _load("runs.json")[name]["unit"] == "epochs" else 1
    runs = _load("runs.json")[name]["runs"]
    return {int(batch): [unit * length for length in runs[batch]] for batch in runs}


@functools.cache
def published() -> dict[str, Entry]:
    """All entries by name."""
    return {
        name: entry | {"field": field}
        for file, field in FIELDS.items()
        for name, entry in _load(f"published/{file}.json").items()
    }


def published_ramps() -> dict[str, Entry]:
    """All ramps of the batch size by name."""
    return _load("published/ramps.json")


def _words(name: str, algorithm: str) -> tuple[str, ...]:
    parts = name.replace("/", "-").split("-")
    return (*name.split("/"), *parts, *FAMILIES.get(algorithm, ()))


def full_name(name: str) -> str:
    """The full name of a recipe, from its name or a part that no other name has."""
    entries = published()
    having = [own for own in entries if name in own.split("/")]
    if name in entries or len(having) == 1:
        return name if name in entries else having[0]
    near = having or difflib.get_close_matches(str(name), entries, cutoff=0.3)
    raise ValueError(
        f"name must be that of a recipe, or a part between slashes that no other has; got "
        f"{name!r}. {'It is a part of' if having else 'Near it are'} {', '.join(near) or 'none'}; "
        f"recipes.table() prints them all."
    )


def rows(entry: Entry) -> list[Entry]:
    """The runs of a recipe, each with the settings that all runs share."""
    return [entry["common"] | point for point in entry["points"]]


@functools.cache
def _load(file: str) -> dict[str, Any]:
    return json.loads(resources.files("optax_largebatch.recipes").joinpath(file).read_text())
