"""The search for the settings of an optimizer at a batch size, of the same size for all of them.

An optimizer says where its learning rates are centred and nothing else: the width of the ranges is
that of this module, and the number of trials that of the workload.
"""

from typing import NamedTuple

import numpy as np

DECADES = 3.0  # from the smallest to the largest learning rate
WEIGHT_DECAYS = (1e-5, 1e-2)
GOLDEN_RATIO = (5**0.5 - 1) / 2


class Settings(NamedTuple):
    """What a trial tries."""

    trial: int
    """Its place in the search: trial 0 has the smallest learning rate."""
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
        Settings(int(trial), float(f"{rate:.4g}"), float(f"{decay:.4g}"))
        for trial, rate, decay in zip(index, rates, decays, strict=True)
    ]


def on_edge(trial: int, trials: int) -> bool:
    """Whether the trial is the first or last of the range: a better rate may lie outside."""
    return trial in (0, trials - 1)


def from_the_middle(trials: int, middle: int) -> list[int]:
    """All trials, those next to `middle` first.

    The order changes how many steps are spent, not what is found: see `sweep`.
    """
    return sorted(range(trials), key=lambda trial: (abs(trial - middle), trial))
