"""Finds the recipe of a batch size: published, between published ones, or beyond them."""

import itertools
import math
from typing import Any

from optax_largebatch.arguments import check_choice, check_flag, check_integer
from optax_largebatch.recipes.recipe import Recipe
from optax_largebatch.recipes.scaling import Hyperparameters, Rule, scale_hyperparameters
from optax_largebatch.recipes.table import Point, names, points, published


def get(name: str, batch_size: int | None = None, *, extrapolate: bool = False) -> Recipe:
    r"""The recipe `name` for a batch size.

    At a published batch size it is what was published. Between two of them,
    :math:`B_0 < B < B_1`, each number is interpolated in the logarithm of the batch size,

    .. math::

        x = x_0^{1 - s} x_1^s, \qquad s = \frac{\log (B / B_0)}{\log (B_1 / B_0)},

    or :math:`(1 - s) x_0 + s x_1` where one of the two is not positive. A rate that a source ties
    to a power of the batch size comes out exactly. Where neighbours were tuned apart, nobody has
    run what lies between them, and the summary says so.

    Args:
        name: one of `names()`.
        batch_size: examples in a step; may be None where only one size was published.
        extrapolate: whether to go beyond the published sizes: the nearest one is then scaled by
            the rule that suits the recipe, see `scale_hyperparameters`.

    Returns:
        The recipe, frozen: `optimizer()`, `schedule()`, `summary()`, `source` and the numbers.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there is no such recipe, or no such batch size.

    Examples:
        >>> from optax_largebatch import recipes
        >>> recipe = recipes.get("bert-large/lamb/mlperf", batch_size=8192)
        >>> print(recipe.learning_rate, recipe.b1, recipe.warmup_steps, recipe.total_steps)
        0.00288293 0.88 287 600
        >>> optimizer, schedule = recipe.optimizer(), recipe.schedule()
        >>> print(recipes.get("bert-large/lamb/mlperf", batch_size=10000).origin)
        interpolated between the published batch sizes 8704 and 12288: nobody has run them
    """
    check_choice("name", name, names())
    check_flag("extrapolate", extrapolate)
    known = points(name)
    if batch_size is None:
        if len(known) > 1:
            raise ValueError(
                f"batch_size must be given for {name!r}, published at {_listed(known)}; got None."
            )
        (batch_size,) = known
    check_integer("batch_size", batch_size, at_least=1)
    entry = published()[name]
    if batch_size in known:
        point, origin = known[batch_size], "as published"
    elif min(known) < batch_size < max(known):
        point, origin = _between(known, batch_size)
    elif extrapolate:
        point, origin = _beyond(known, batch_size, entry["rule"])
    else:
        raise ValueError(
            f"batch_size must be within the batch sizes at which {name!r} was published, "
            f"{_listed(known)}; got {batch_size}. Beyond them there is no evidence that it trains: "
            f"past its critical batch size a task gains ever less from a larger batch, and the "
            f"learning rates that it bears stop growing. Take {_nearest(known, batch_size)}, or "
            f"pass extrapolate=True to scale that by the rule {entry['rule']!r}, and tune from "
            f"there."
        )
    described = {field: entry[field] for field in ("task", "source", "note", "algorithm")}
    return Recipe(name=name, origin=origin, **described, **point)


def _between(known: dict[int, Point], batch_size: int) -> tuple[Point, str]:
    pairs = itertools.pairwise(sorted(known))
    low, high = next(pair for pair in pairs if pair[0] < batch_size < pair[1])
    part = math.log(batch_size / low) / math.log(high / low)
    point = {
        name: _interpolated(value, known[high][name], part) for name, value in known[low].items()
    }
    origin = f"interpolated between the published batch sizes {low} and {high}: nobody has run them"
    return point | {"batch_size": batch_size}, origin


def _interpolated(low: Any, high: Any, part: float) -> Any:
    """A number; what is none, such as a flag or a name, is the same at all published sizes."""
    if low == high:
        return low
    geometric = low > 0 and high > 0
    value = low ** (1 - part) * high**part if geometric else (1 - part) * low + part * high
    return round(value) if isinstance(low, int) and isinstance(high, int) else value


def _beyond(known: dict[int, Point], batch_size: int, rule: Rule) -> tuple[Point, str]:
    nearest = _nearest(known, batch_size)
    point = known[nearest]
    settings = Hyperparameters(
        learning_rate=point["learning_rate"],
        warmup_steps=point["warmup_steps"],
        total_steps=point["total_steps"],
    )
    scaled = scale_hyperparameters(settings, nearest, batch_size, rule).settings
    shrink = scaled.total_steps / point["total_steps"]
    lengths = {
        name: round(point[name] * shrink)
        for name in ("hold_steps", "warmup_begin_step")
        if name in point
    }
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


def _nearest(known: dict[int, Point], batch_size: int) -> int:
    return min(known) if batch_size < min(known) else max(known)


def _listed(known: dict[int, Point]) -> str:
    return ", ".join(map(str, sorted(known)))
