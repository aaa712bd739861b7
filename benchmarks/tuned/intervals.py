"""Differences between two optimizers that were run with the same seeds."""

from collections.abc import Iterable, Mapping, Sequence
import functools
import math
from typing import Any, NamedTuple

import numpy as np

from optax_largebatch.diagnostics.noise_scale import student_quantile

CONFIDENCE = 0.95
quantile_of = functools.cache(student_quantile)


class Difference(NamedTuple):
    """How much more one loses than the other, in the mean over the seeds; below 0 is better."""

    mean: float
    low: float
    high: float
    """From `low` to `high`: 95%, if the differences between seeds are normal."""

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        text = f"{self.mean:+.3f}"
        if not math.isfinite(self.mean):
            return text
        text = f"**{text}**" if self.is_clear else text
        return f"{text} ({self.low:+.3f} to {self.high:+.3f})"


def difference(own: Mapping[int, float], other: Mapping[int, float]) -> Difference:
    """`own` minus `other`, seed by seed: what a seed does to both takes no part.

    An infinite loss, of a run that diverged, leaves no interval: it is infinite on both sides.
    """
    if set(own) != set(other):
        raise ValueError(f"the seeds must be the same, got {sorted(own)} and {sorted(other)}.")
    apart = np.array([own[seed] - other[seed] for seed in own])
    mean = float(apart.mean())
    if not math.isfinite(mean):
        return Difference(mean, -math.inf, math.inf)
    quantile = float(quantile_of((1 + CONFIDENCE) / 2, len(apart) - 1))
    reach = quantile * float(apart.std(ddof=1)) / math.sqrt(len(apart))
    return Difference(mean, mean - reach, mean + reach)


def over_the_first(
    rows: Iterable[Sequence[Any]], cells: Iterable[tuple[Any, ...]], ways: Iterable[Any]
) -> list[list[str]]:
    """A line for each cell that is complete: the mean of the first way, and how far the others are.

    A row begins with its cell and its way, and ends with a seed and a loss.
    """
    losses: dict[Any, dict[int, float]] = {}
    for *place, seed, loss in rows:
        losses.setdefault(tuple(place), {})[seed] = loss
    lines = []
    for cell in cells:
        usual, *others = (losses.get((*cell, way), {}) for way in ways)
        if usual and all(x.keys() == usual.keys() for x in others):
            differences = [str(difference(x, usual)) for x in others]
            lines.append([", ".join(cell), f"{np.mean([*usual.values()]):.3f}", *differences])
    return lines
