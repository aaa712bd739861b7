"""The numbers of one run, converted from epochs, parts and rules to steps and values."""

import dataclasses
import math
from typing import Any

from optax_largebatch.recipes.published import Entry
from optax_largebatch.recipes.settings import Group

Numbers = dict[str, Any]
"""The fields of a `Recipe` that belong to one run."""

_STEPS = {
    "nearest": lambda epochs, examples, batch: round(epochs * examples / batch),
    "down": lambda epochs, examples, batch: epochs * examples // batch,
    "full batches": lambda epochs, examples, batch: epochs * (examples // batch),
    "all batches": lambda epochs, examples, batch: epochs * math.ceil(examples / batch),
    "nearest batches": lambda epochs, examples, batch: epochs * round(examples / batch),
}
"""How a source rounds epochs to steps: the whole run, or each epoch."""

STATED_RULES = {"linear": ("B / 256", lambda batch: batch / 256), "sqrt": ("sqrt(B)", math.sqrt)}
"""The factors by which sources multiply a base learning rate."""


def numbers(name: str, entry: Entry, row: Entry, given: Numbers) -> Numbers:
    """The numbers of one run.

    Args:
        name: the name of the recipe, for messages.
        entry: the entry of the recipe.
        row: the entry of the run.
        given: the caller's settings, in place of the source or where it says nothing.

    Returns:
        The numbers, all lengths in steps.

    Raises:
        ValueError: a setting is neither in the source nor given.
    """
    _check_complete(name, entry, row, given)
    row = row | {key: given[key] for key in ("batch_size", "epochs") if key in given}
    examples = given.get("examples", entry.get("examples"))
    rounding = entry.get("steps", "nearest")

    def steps(epochs: float) -> int:
        if epochs == 0:
            return 0
        if examples is None:
            raise ValueError(f"examples must be given for {name!r}: it has none in its source.")
        return _STEPS[rounding.removesuffix(" and one")](epochs, examples, row["batch_size"])

    found: Numbers = {key: _frozen(x) for key, x in row.items()}
    for key in ("learning_rate", "bias_learning_rate"):
        base = found.pop(f"base_{key}", None)
        if base is not None:
            _, factor = STATED_RULES[entry["rule"]]
            found[key] = base * factor(row["batch_size"])
    found |= {key: given[key] for key in given.keys() - {"examples"}}
    for key in ("end", "warmup_begin"):
        if f"{key}_ratio" in found:
            found[f"{key}_value"] = found.pop(f"{key}_ratio") * found["learning_rate"]

    if "total_steps" not in found and "decay_steps" not in found:
        found["total_steps"] = steps(found["epochs"]) + rounding.endswith(" and one")
    for key in ("warmup", "hold"):
        epochs, ratio = found.pop(f"{key}_epochs", None), found.pop(f"{key}_ratio", None)
        if f"{key}_steps" in given:
            continue
        if epochs is not None:
            found[f"{key}_steps"] = steps(epochs)
        if ratio is not None:
            found[f"{key}_steps"] = round(ratio * found["total_steps"])
    if "decay_steps" in found:
        before = found["warmup_steps"] if found.pop("decay_steps_of") == "decay" else 0
        found.setdefault("total_steps", before + found["decay_steps"])
        del found["decay_steps"]
    for key in ("", "others_"):
        ratio = found.pop(f"{key}decay_ratio", None)
        if ratio is not None:  # the decay is the last part of the run, what comes before is held
            warmed = max(found["warmup_steps"] + found.get("warmup_begin_step", 0), 0)
            found[f"{key}hold_steps"] = max(
                found["total_steps"] - round(ratio * found["total_steps"]) - warmed, 0
            )
    if "learning_rate" in row:
        found = with_groups_scaled(found, found["learning_rate"] / row["learning_rate"])
    if found.pop("stairs", False) or found.get("decay") == "exponential":
        found["steps_per_stair"] = steps(1)
    if found["warmup_steps"] == 0:  # a warm-up without a length has no begin
        found["warmup_begin_step"] = 0
    return found


def with_groups_scaled(found: Numbers, factor: float) -> Numbers:
    """The numbers with the rates of the parameters beside Muon multiplied by a factor."""
    scaled = {
        key: dataclasses.replace(group, learning_rate=factor * group.learning_rate)
        for key, group in found.items()
        if isinstance(group, Group) and group.learning_rate is not None and factor != 1
    }
    return found | scaled


def _frozen(value: Any) -> Any:
    """A value of a file as a field of a `Recipe`."""
    if isinstance(value, dict):
        return Group(**value)
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _check_complete(name: str, entry: Entry, row: Entry, given: Numbers) -> None:
    missing = [
        key for key in entry.get("not_said", ()) if key not in given and _needed(key, row, given)
    ]
    if missing:
        listed = " and ".join(missing)
        raise ValueError(
            f"{listed} must be given for {name!r}: its source does not say "
            f"{'it' if len(missing) == 1 else 'them'}, and nothing is filled in. The source is "
            f"{entry['source']}."
        )


def _needed(key: str, row: Entry, given: Numbers) -> bool:
    """Whether the run cannot be converted to steps without this setting."""
    if key == "epochs":
        return "total_steps" not in given
    if key != "examples":
        return True
    lengths = [row.get(f"{of}_epochs") for of in ("warmup", "hold") if f"{of}_steps" not in given]
    in_epochs = any(lengths) or row.get("stairs") or row.get("decay") == "exponential"
    return bool(in_epochs) or "total_steps" not in given
