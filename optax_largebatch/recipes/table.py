"""The published settings, read from the package's own tables and brought to one form.

`published.json` has them as their sources give them: a warm-up in steps, in epochs or as a part of
the run. Here all lengths become steps.
"""

import functools
from importlib import resources
import json
from typing import Any

from optax_largebatch.arguments import check_choice

Point = dict[str, Any]
"""The fields of a `Recipe` that belong to one batch size."""


def names() -> list[str]:
    """The names of all recipes, for `get`.

    Returns:
        The names, in alphabetical order.

    Examples:
        >>> from optax_largebatch import recipes
        >>> print(recipes.names()[:2])
        ['bert-large/lamb/mlperf', 'bert-large/lamb/nvidia-phase1']
    """
    return sorted(published())


def batch_sizes(name: str) -> list[int]:
    """The batch sizes at which a recipe was published.

    Args:
        name: one of `names()`.

    Returns:
        The batch sizes, in ascending order.

    Raises:
        ValueError: there is no such recipe.

    Examples:
        >>> from optax_largebatch import recipes
        >>> print(recipes.batch_sizes("resnet50/lars/square-root"))
        [512, 1024, 4096, 8192]
    """
    check_choice("name", name, names())
    return sorted(points(name))


def examples_to_target(name: str) -> dict[int, list[int]]:
    """What every reference run of a recipe needed to reach the target of its benchmark.

    Args:
        name: a recipe of MLPerf's; the others did not publish single runs.

    Returns:
        Examples seen, of each run, by batch size.

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


def published() -> dict[str, Any]:
    """The table as it is in the file."""
    return _load("published.json")


def points(name: str) -> dict[int, Point]:
    """The settings of one recipe by batch size, all lengths in steps."""
    entry = published()[name]
    return {
        row["batch_size"]: _in_steps(entry["common"] | row, entry.get("examples"))
        for row in entry["points"]
    }


def _in_steps(row: dict[str, Any], examples: int | None) -> Point:
    row = dict(row)
    for name in ("warmup", "hold"):
        if f"{name}_ratio" in row:
            row[f"{name}_steps"] = round(row.pop(f"{name}_ratio") * row["total_steps"])
    if examples is not None:
        steps_per_epoch = examples / row["batch_size"]
        row["warmup_steps"] = round(row.pop("warmup_epochs") * steps_per_epoch)
        if "epochs" in row:
            row["total_steps"] = round(row.pop("epochs") * steps_per_epoch)
    if "decay_steps" in row:
        before = row["warmup_steps"] if row.pop("decay_steps_of") == "decay" else 0
        row["total_steps"] = before + row.pop("decay_steps")
    if "drops" in row:
        row["drops"] = tuple(row["drops"])
    if row["warmup_steps"] == 0:  # what has no length begins nowhere
        row["warmup_begin_step"] = 0
    return row


@functools.cache
def _load(file: str) -> dict[str, Any]:
    return json.loads(resources.files("optax_largebatch.recipes").joinpath(file).read_text())
