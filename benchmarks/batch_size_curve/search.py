"""The search for the settings of an optimizer at a batch size, of the same size for all of them.

An optimizer decides only where its learning rates are centred. This module decides the width of the
ranges, and the workload the number of trials.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

FINE = 10**0.1  # 1.26, between the rates that are tried near the best
DECADES = 3.0  # from the smallest to the largest learning rate
WEIGHT_DECAYS = (1e-5, 1e-2)
GOLDEN_RATIO = (5**0.5 - 1) / 2


class Settings(NamedTuple):
    """The settings of a trial."""

    trial: int
    """The trial's place in the search: trial 0 has the smallest learning rate."""
    learning_rate: float
    weight_decay: float


def search_space(centre: float, trials: int) -> list[Settings]:
    """The settings of every trial, evenly spread.

    Learning rates are the middles of equal parts of the range, in the logarithm; weight decays are
    a golden ratio apart, in the logarithm, so that neighbouring learning rates have distant ones.
    """
    index = np.arange(trials)
    rates = centre * 10 ** (DECADES * ((index + 0.5) / trials - 0.5))
    low, high = WEIGHT_DECAYS
    decays = low * (high / low) ** ((index + 0.5) * GOLDEN_RATIO % 1)
    return [
        Settings(int(trial), _rounded(rate), _rounded(decay))
        for trial, rate, decay in zip(index, rates, decays, strict=True)
    ]


def refined(best: Settings, trials: int, fine: int) -> list[Settings]:
    """`fine` more trials, half of them below the best of the others and half above, the near first.

    They keep the weight decay of the best trial, which hardly matters in such short runs.
    """
    powers = [sign * power for power in range(1, fine // 2 + 1) for sign in (-1, 1)]
    return [
        best._replace(
            trial=trials + index, learning_rate=_rounded(best.learning_rate * FINE**power)
        )
        for index, power in enumerate(powers)
    ]


def on_edge(chosen: Settings, space: Sequence[Settings]) -> bool:
    """Whether the best rate is the smallest or largest of all: a better one may lie outside."""
    rates = [own.learning_rate for own in space]
    return chosen.learning_rate in (min(rates), max(rates))


def _rounded(number: float) -> float:
    """The settings rounded to four digits, as in the table."""
    return float(f"{number:.4g}")


def from_the_middle(trials: int, middle: int) -> list[int]:
    """All trials, those next to `middle` first.

    The order changes how many steps are spent, not what is found: see `sweep`.
    """
    return sorted(range(trials), key=lambda trial: (abs(trial - middle), trial))
