"""Finds the recipe for a batch size: published, or by the rule of its source."""

import dataclasses
import math
from typing import Any

from optax_largebatch.arguments import check_integer, check_number
from optax_largebatch.recipes.calls import given
from optax_largebatch.recipes.catalogue import Entry, check_said, different, find, rows
from optax_largebatch.recipes.recipe import Recipe
from optax_largebatch.recipes.settings import Group

Numbers = dict[str, Any]
"""The fields of a `Recipe` that belong to one run."""

STATED_RULES = {"linear": ("B / 256", lambda batch: batch / 256), "sqrt": ("sqrt(B)", math.sqrt)}
"""The factors by which sources multiply a base learning rate."""

ROUNDINGS = {
    "nearest": (round, "run"),
    "down": (math.floor, "run"),
    "full batches": (math.floor, "epoch"),
    "all batches": (math.ceil, "epoch"),
    "nearest batches": (round, "epoch"),
}
"""How a source rounds epochs to steps: the whole run, or each epoch."""

LEAST = {"batch_size": 1, "epochs": 1, "examples": 1, "total_steps": 1, "warmup_steps": 0}
"""The smallest integers that a caller may pass."""


def get(
    name: str,
    batch_size: int | None = None,
    *,
    epochs: int | None = None,
    examples: int | None = None,
    total_steps: int | None = None,
    warmup_steps: int | None = None,
    learning_rate: float | None = None,
    bias_learning_rate: float | None = None,
    weight_decay: float | None = None,
) -> Recipe:
    r"""The recipe `name` for a batch size.

    At a published batch size, the recipe is as published. At others, the learning rate follows the
    rule that the source states, if there is one, and the summary says that it is extrapolated.

    If a source leaves out a setting, nothing is filled in: you have to pass it. You may also
    replace a setting of the source. Another `learning_rate` scales the whole schedule, and the
    rates of biases, embeddings and the like with it. With another `total_steps`, a warm-up or hold
    in epochs or steps stays as long as it was, and one that is a part of the run changes with it.

    Args:
        name: one of `names()`, or words that no other has: `"byol"`, `"RSB A2"`; also of timm's
            and papers' names. A batch size may choose among them.
        batch_size: examples in a step (sequences, for language models); may be None if only one
            size was published.
        epochs: one of the published numbers of epochs, if there are several; otherwise a number in
            place of the published one.
        examples: examples in an epoch, in place of the size of the source's data set.
        total_steps: steps of the run.
        warmup_steps: steps of the warm-up.
        learning_rate: the peak of the schedule.
        bias_learning_rate: the peak for biases and norms, if they have their own.
        weight_decay: the weight decay of the parameters that are decayed.

    Returns:
        The recipe, frozen: `optimizer()`, `schedule()`, `summary()`, `code()`,
        `source` and the numbers.

    Raises:
        ValueError: there is no such recipe or batch size, or the source leaves out a setting that
            is not given.

    Examples:
        >>> from optax_largebatch import recipes
        >>> recipe = recipes.get("bert-large/lamb/mlperf", batch_size=8192)
        >>> print(recipe.learning_rate, recipe.b1, recipe.warmup_steps, recipe.total_steps)
        0.00288293 0.88 287 600
        >>> optimizer, schedule = recipe.optimizer(), recipe.schedule()
        >>> recipe = recipes.get("byol", batch_size=2048, epochs=300)
        >>> print(recipe.learning_rate, recipe.warmup_steps, recipe.total_steps)
        2.4 6255 187670
    """
    entry = find(name, batch_size)
    if entry["field"] == "ramps":
        raise ValueError(
            f"name must be that of a recipe; {entry['name']!r} is a ramp, for recipes.ramp."
        )
    passed = given(
        batch_size=batch_size,
        epochs=epochs,
        examples=examples,
        total_steps=total_steps,
        warmup_steps=warmup_steps,
        learning_rate=learning_rate,
        bias_learning_rate=bias_learning_rate,
        weight_decay=weight_decay,
    )
    _check(entry, passed)
    run, origin = _nearest(entry, _of_epochs(entry, passed), passed)
    settings = _in_steps(entry, run, passed)
    replaced = sorted(passed.keys() - {"batch_size", *entry["not_said"]})
    if replaced:
        origin += f"; {', '.join(replaced)} as given here"
    if origin != "as published":  # the published result is that of another run
        settings["result"] = None
    for key in ("field", "task", "source", "note", "algorithm", "not_decayed", "not_adapted"):
        settings[key] = _frozen(entry[key])
    if "units" in entry:
        origin += f"; {entry['units']}"
    dialect = entry.get("dialect")
    recipe = Recipe(name=entry["name"], origin=origin, dialect=dialect, **settings)
    recipe.schedule()  # raises an error if the run is shorter than its warm-up
    return recipe


def _check(entry: Entry, passed: Numbers) -> None:
    """Checks the settings that the caller passed, and that the recipe has them."""
    for key, value in passed.items():
        if key in LEAST:
            check_integer(key, value, at_least=LEAST[key])
        else:
            check_number(key, value, "[0, inf)" if key == "weight_decay" else "(0, inf)")
    settings = {*rows(entry)[0], *entry["not_said"]}
    has_bias_rate = "bias_learning_rate" in settings
    for key, fits, why in (
        ("bias_learning_rate", has_bias_rate, "biases have the rate of all parameters"),
        ("weight_decay", entry["algorithm"] not in ("muonh", "scaled_adam"), "optimizer has none"),
        ("epochs", "epochs" in settings, "length is published in steps: pass total_steps"),
    ):
        if key in passed and not fits:
            raise ValueError(
                f"{key} must be None for {entry['name']!r}, whose {why}; got {passed[key]!r}."
            )


def _of_epochs(entry: Entry, passed: Numbers) -> list[Entry]:
    """The runs with the wanted number of epochs, at most one for each batch size."""
    runs = rows(entry)
    lengths = different(runs, "epochs")
    if len(lengths) < 2:
        return runs
    batch_size = passed.get("batch_size")
    at = {run["epochs"] for run in runs if batch_size in (None, run.get("batch_size"))}
    wanted = passed.pop("epochs", min(at) if len(at) == 1 else None)
    if wanted not in lengths:
        raise ValueError(
            f"epochs must be one of {', '.join(map(str, lengths))} for {entry['name']!r}, got "
            f"{wanted}: its settings differ with them. For another length, give total_steps, too."
        )
    return [run for run in runs if run["epochs"] == wanted]


def _nearest(
    entry: Entry,
    runs: list[Entry],
    passed: Numbers,
) -> tuple[Entry, str]:
    """The run of the nearest batch size, and the origin of numbers at the wanted one."""
    by_size = {run["batch_size"]: run for run in runs if "batch_size" in run}
    if not by_size:
        return runs[0], "as published, for any batch size"
    sizes = ", ".join(map(str, sorted(by_size)))
    if "batch_size" not in passed and len(by_size) > 1:
        raise ValueError(
            f"batch_size must be given for {entry['name']!r}, published at {sizes}; got None."
        )
    wanted = passed.get("batch_size", min(by_size))
    nearest = min(by_size, key=lambda size: abs(size - wanted))
    if wanted == nearest:
        return by_size[wanted], "as published"
    base = by_size[nearest].get("base_learning_rate")
    if base is None:
        raise ValueError(
            f"batch_size must be one of the batch sizes at which {entry['name']!r} was published, "
            f"{sizes}; got {wanted}. Nobody has shown that it trains at others. Take {nearest}, "
            "and pass other learning_rate and total_steps, for example those of batch_plan."
        )
    return by_size[nearest], (
        f"extrapolated from the published batch size {nearest} by the rule of the source, "
        f"{base:g} {STATED_RULES[entry['rule']][0]}: no run of this size was published"
    )


def _in_steps(entry: Entry, run: Entry, passed: Numbers) -> Numbers:
    """The numbers of one run with those of the caller, all lengths in steps."""
    stands_for = ("epochs", "examples") if "total_steps" in passed else ()
    check_said(entry, {*passed, *stands_for})
    settings = {key: _frozen(value) for key, value in run.items()} | passed
    examples = settings.pop("examples", entry.get("examples"))

    def steps(epochs: float) -> int:
        if examples is None:
            raise ValueError(
                f"examples must be given for {entry['name']!r}: it has none in its source."
            )
        rounded, period = ROUNDINGS[entry.get("rounding", "nearest")]
        batch = settings["batch_size"]
        if period == "epoch":
            return epochs * rounded(examples / batch)
        return rounded(epochs * examples / batch)

    extra = settings.pop("extra_steps", 0)
    if "total_steps" not in settings:
        settings["total_steps"] = steps(settings["epochs"]) + extra
    for length in ("warmup", "hold", "others_hold"):
        epochs = settings.pop(f"{length}_epochs", 0)
        part = settings.pop(f"{length}_ratio", 0)
        if epochs or part:
            length_in_steps = steps(epochs) if epochs else round(part * settings["total_steps"])
            settings.setdefault(f"{length}_steps", length_in_steps)
    settings.setdefault("warmup_steps", 0)
    if "decay_ratio" in settings:  # what the warm-up and the decay leave is held
        decay = round(settings.pop("decay_ratio") * settings["total_steps"])
        warmed_up = settings["warmup_steps"] + settings.get("warmup_begin_step", 0)
        settings["hold_steps"] = settings["total_steps"] - decay - warmed_up
    if settings.pop("stairs", False):
        settings["steps_per_stair"] = steps(1)
    return _with_rates(entry, run, settings, passed)


def _with_rates(
    entry: Entry,
    run: Entry,
    settings: Numbers,
    passed: Numbers,
) -> Numbers:
    """The settings with the rates by the rule of the source, or in proportion to the caller's."""
    base = settings.pop("base_learning_rate", None)
    if base is not None:
        _, factor = STATED_RULES[entry["rule"]]
        published = base * factor(run.get("batch_size", settings["batch_size"]))
        settings.setdefault("learning_rate", base * factor(settings["batch_size"]))
    else:
        published = run.get("learning_rate", settings["learning_rate"])
    change = settings["learning_rate"] / published
    for key in ("bias_learning_rate", "warmup_begin_value", "end_value"):
        if key in settings and key not in passed:
            settings[key] *= change
    for key, group in settings.items():
        if isinstance(group, Group) and group.learning_rate is not None:
            settings[key] = dataclasses.replace(group, learning_rate=group.learning_rate * change)
    return settings


def _frozen(value: Any) -> Any:
    """A value of a file as a field of a `Recipe`."""
    if isinstance(value, dict):
        return Group(**value)
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
