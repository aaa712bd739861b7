"""Finds the recipe for a batch size: published, interpolated, or extrapolated."""

import itertools
import math
from typing import Any

from optax_largebatch.arguments import check_flag, check_integer, check_number
from optax_largebatch.recipes.hyperparameters import Hyperparameters
from optax_largebatch.recipes.numbers import STATED_RULES, Numbers, numbers, with_groups_scaled
from optax_largebatch.recipes.published import Entry, full_name, published, rows
from optax_largebatch.recipes.recipe import Recipe
from optax_largebatch.recipes.scaling import scale_hyperparameters
from optax_largebatch.recipes.scaling_rules import RuleName

_GIVEN = {
    "epochs": 1,
    "examples": 1,
    "total_steps": 1,
    "warmup_steps": 0,
    "learning_rate": "(0, inf)",
    "bias_learning_rate": "(0, inf)",
    "weight_decay": "[0, inf)",
}
"""Settings that a caller may give in place of the source: the least integer, or the interval."""


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
    extrapolate: bool = False,
) -> Recipe:
    r"""The recipe `name` for a batch size.

    At a published batch size, the recipe is as published. Between two published sizes,
    :math:`B_0 < B < B_1`, each number is interpolated in the logarithm of the batch size,

    .. math::

        x = x_0^{1 - s} x_1^s, \qquad s = \frac{\log (B / B_0)}{\log (B_1 / B_0)},

    or :math:`(1 - s) x_0 + s x_1` where one of the two is not positive. If a source ties the rate
    to a power of the batch size, interpolation gives it exactly. If neighbours were tuned
    separately, nobody has run the sizes between them, and the summary says so.

    Beyond the published sizes, the learning rate follows the rule that the source states, if there
    is one, and the summary says that it is extrapolated.

    If a source leaves out a setting, nothing is filled in: you have to pass it. You may also
    replace a setting of the source. With another `total_steps`, a warm-up in epochs or steps stays
    as long as it was, and a warm-up that is a part of the run changes with it. The warm-up begins
    and the decay ends at the published value, or at the peak if that is lower.

    Args:
        name: one of `names()`, or a part that no other name has: `"byol"`.
        batch_size: examples in a step (sequences, for language models); may be None where only one
            size was published.
        epochs: one of the published numbers of epochs, if there are several; otherwise a number in
            place of the published one.
        examples: examples in an epoch, in place of the size of the source's data set.
        total_steps: steps of the run.
        warmup_steps: steps of the warm-up.
        learning_rate: the peak of the schedule. Rates of embeddings and the like beside Muon change
            by the same factor.
        bias_learning_rate: the peak for biases and norms, where they have their own.
        weight_decay: the weight decay of the parameters that are decayed.
        extrapolate: whether to go beyond the published sizes where the source states no rule. The
            nearest size is then scaled by the rule that suits the recipe; see
            `scale_hyperparameters`.

    Returns:
        The recipe, frozen: `optimizer()`, `schedule()`, `summary()`, `code()`,
        `source` and the numbers.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there is no such recipe or batch size, or the source leaves out a setting that
            is not given.

    Examples:
        >>> from optax_largebatch import recipes
        >>> recipe = recipes.get("bert-large/lamb/mlperf", batch_size=8192)
        >>> print(recipe.learning_rate, recipe.b1, recipe.warmup_steps, recipe.total_steps)
        0.00288293 0.88 287 600
        >>> optimizer, schedule = recipe.optimizer(), recipe.schedule()
        >>> print(recipes.get("bert-large/lamb/mlperf", batch_size=10000).origin)
        interpolated between the published batch sizes 8704 and 12288: nobody has run them
        >>> recipe = recipes.get("byol", batch_size=2048, epochs=300)
        >>> print(recipe.learning_rate, recipe.warmup_steps, recipe.total_steps)
        2.4 6255 187670
    """
    name = full_name(name)
    entry = published()[name]
    check_flag("extrapolate", extrapolate)
    given = _checked(
        epochs=epochs,
        examples=examples,
        total_steps=total_steps,
        warmup_steps=warmup_steps,
        learning_rate=learning_rate,
        bias_learning_rate=bias_learning_rate,
        weight_decay=weight_decay,
    )
    if batch_size is not None:
        check_integer("batch_size", batch_size, at_least=1)
    if "bias_learning_rate" in given and not _has_bias_rate(entry):
        raise ValueError(
            f"bias_learning_rate must be None for {name!r}, whose biases have the same rate as "
            f"all parameters; got {bias_learning_rate!r}."
        )
    if "weight_decay" in given and entry["algorithm"] == "muonh":
        raise ValueError(
            f"weight_decay must be None for {name!r}, whose matrices keep their norms; got "
            f"{weight_decay!r}."
        )
    runs = _of_epochs(name, rows(entry), batch_size, given)
    found, origin = _at(name, entry, runs, batch_size, given, extrapolate)
    found |= {key: given[key] for key in given.keys() - {"examples"}}
    # The source gives both ends as numbers, which may be above the peak of a smaller batch size.
    for end in found.keys() & {"warmup_begin_value", "end_value"}:
        found[end] = min(found[end], found["learning_rate"])
    replaced = sorted(given.keys() - set(entry.get("not_said", ())))
    if replaced:
        origin += f"; {', '.join(replaced)} as given here"
    _check_lengths(name, found)
    described = {key: entry[key] for key in ("field", "task", "source", "note", "algorithm")} | {
        key: tuple(entry[key]) for key in ("not_decayed", "not_adapted")
    }
    found.setdefault("result", entry.get("result"))
    if origin != "as published":  # the published result is that of another run
        found["result"] = None
    return Recipe(name=name, origin=origin, dialect=entry.get("dialect"), **described, **found)


def _at(
    name: str,
    entry: Entry,
    runs: list[Entry],
    batch_size: int | None,
    given: Numbers,
    extrapolate: bool,
) -> tuple[Numbers, str]:
    """The numbers at a batch size, and their origin."""
    known = {run["batch_size"]: run for run in runs if "batch_size" in run}
    if batch_size is None:
        if len(known) > 1:
            raise ValueError(
                f"batch_size must be given for {name!r}, published at {_listed(known)}; got None."
            )
        (batch_size,) = known or (None,)
    if not known:
        (run,) = runs
        own = {} if batch_size is None else {"batch_size": batch_size}
        return numbers(name, entry, run, given | own), "as published, for any batch size"
    assert batch_size is not None
    if batch_size in known:
        return numbers(name, entry, known[batch_size], given), "as published"
    if min(known) < batch_size < max(known):
        return _between(name, entry, known, batch_size, given)
    nearest = _nearest(known, batch_size)
    base = known[nearest].get("base_learning_rate")
    if base is not None:
        rule, _ = STATED_RULES[entry["rule"]]
        origin = (
            f"extrapolated from the published batch size {nearest} by the rule of the source, "
            f"{base:g} {rule}: no run of this size was published"
        )
        return numbers(name, entry, known[nearest], given | {"batch_size": batch_size}), origin
    if not extrapolate:
        raise ValueError(
            f"batch_size must be within the batch sizes at which {name!r} was published, "
            f"{_listed(known)}; got {batch_size}. Beyond them there is no evidence that it trains: "
            f"past its critical batch size a task gains less and less from a larger batch, and the "
            f"learning rates at which it trains stop growing. Take {nearest}, or "
            f"pass extrapolate=True to scale that by the rule {entry['rule']!r}, and tune from "
            f"there."
        )
    point = numbers(name, entry, known[nearest], given)
    return _beyond(point, nearest, batch_size, entry["rule"])


def _of_epochs(name: str, runs: list[Entry], batch_size: int | None, given: Numbers) -> list[Entry]:
    """The runs with the wanted number of epochs, at most one for each batch size."""
    lengths = sorted({run["epochs"] for run in runs if "epochs" in run})
    if len(lengths) < 2:
        fixed = [run for run in runs if "total_steps" in run]
        if "epochs" in given and fixed:
            raise ValueError(
                f"epochs must be None for {name!r}, whose length is published in steps; got "
                f"{given['epochs']!r}. Give total_steps."
            )
        return runs
    if "epochs" in given:
        wanted = given.pop("epochs")
        if wanted not in lengths:
            raise ValueError(
                f"epochs must be one of {', '.join(map(str, lengths))} for {name!r}, got {wanted}: "
                f"its settings differ with them. For a run of another length take one of these and "
                f"give total_steps."
            )
    else:
        at = {run["epochs"] for run in runs if batch_size in (None, run.get("batch_size"))}
        if len(at or lengths) > 1:
            choices = ", ".join(map(str, sorted(at or lengths)))
            raise ValueError(f"epochs must be given for {name!r}, one of {choices}; got None.")
        (wanted,) = at or lengths
    return [run for run in runs if run["epochs"] == wanted]


def _between(
    name: str, entry: Entry, known: dict[int, Entry], batch_size: int, given: Numbers
) -> tuple[Numbers, str]:
    pairs = itertools.pairwise(sorted(known))
    low, high = next(pair for pair in pairs if pair[0] < batch_size < pair[1])
    part = math.log(batch_size / low) / math.log(high / low)
    at_low, at_high = (numbers(name, entry, known[size], given) for size in (low, high))
    point = {
        key: _interpolated(value, at_high[key], part)
        for key, value in at_low.items()
        if key != "result"
    }
    origin = f"interpolated between the published batch sizes {low} and {high}: nobody has run them"
    return point | {"batch_size": batch_size}, origin


def _interpolated(low: Any, high: Any, part: float) -> Any:
    """A number between two; flags and names are the same at all published sizes."""
    if low == high:
        return low
    geometric = low > 0 and high > 0
    value = low ** (1 - part) * high**part if geometric else (1 - part) * low + part * high
    return round(value) if isinstance(low, int) and isinstance(high, int) else value


def _beyond(point: Numbers, nearest: int, batch_size: int, rule: RuleName) -> tuple[Numbers, str]:
    settings = Hyperparameters(
        learning_rate=point["learning_rate"],
        warmup_steps=point["warmup_steps"],
        total_steps=point["total_steps"],
    )
    scaled = scale_hyperparameters(
        settings, from_batch=nearest, to_batch=batch_size, rule=rule
    ).settings
    shrink = scaled.total_steps / point["total_steps"]
    lengths = {
        name: round(point[name] * shrink)
        for name in ("hold_steps", "others_hold_steps", "warmup_begin_step", "steps_per_stair")
        if name in point
    }
    point = with_groups_scaled(point, scaled.learning_rate / point["learning_rate"])
    origin = (
        f"extrapolated from the published batch size {nearest} by the rule {rule!r}: a place to "
        f"start tuning, not a result"
    )
    return point | lengths | {
        "batch_size": batch_size,
        "learning_rate": scaled.learning_rate,
        "warmup_steps": scaled.warmup_steps,
        "total_steps": scaled.total_steps,
    }, origin


def _checked(**given: float | None) -> Numbers:
    """The given settings, checked."""
    for name, value in given.items():
        allowed = _GIVEN[name]
        if value is None:
            continue
        if isinstance(allowed, int):
            check_integer(name, value, at_least=allowed)
        else:
            check_number(name, value, allowed)
    return {name: value for name, value in given.items() if value is not None}


def _check_lengths(name: str, found: Numbers) -> None:
    if found.get("decay") in ("inverse_sqrt", "exponential", "constant"):
        return
    warmed = max(found["warmup_steps"] + found.get("warmup_begin_step", 0), 0)
    before = warmed + (found.get("hold_steps") or 0)
    if found["total_steps"] < before:
        raise ValueError(
            f"total_steps must be no less than the warm-up and the hold of {name!r}, {before} "
            f"steps; got {found['total_steps']}. Give a shorter warm-up, too: warmup_steps."
        )


def _has_bias_rate(entry: Entry) -> bool:
    run = rows(entry)[0]
    return "base_bias_learning_rate" in run or "bias_learning_rate" in entry.get("not_said", ())


def _nearest(known: dict[int, Any], batch_size: int) -> int:
    return min(known) if batch_size < min(known) else max(known)


def _listed(known: dict[int, Any]) -> str:
    return ", ".join(map(str, sorted(known)))
