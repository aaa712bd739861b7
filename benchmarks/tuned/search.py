"""The budget of a cell, and the settings that are tried: the same for every optimizer.

An optimizer decides only where its learning rates are centred, and whether it has a weight decay.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy.stats import qmc

DECADES = 2.0  # from the smallest to the largest learning rate
WEIGHT_DECAYS = (1e-3, 1.0)
OFF = 1 / 8  # the part of the trials that have no weight decay
MOMENTA = (0.5, 0.95)
FACTORS = (1 / 4, 1 / 2, 2.0, 4.0)  # of the best rate, to see how far one may be wrong
DECAYS = (0.0, 0.01, 0.1, 0.3, 1.0)  # in the place of the best one, for the same


class Budget(NamedTuple):
    """The runs that an optimizer has in each cell. No seed is used for two purposes."""

    trials: int = 64
    """Settings that are run with the first seed."""
    finalists: int = 4
    """The best of these, which are run again."""
    again: int = 2
    """Further seeds of each finalist; the best in the mean is chosen."""
    finals: int = 8
    """New seeds of the chosen settings, which are what is reported."""
    around: int = 2
    """How many of those seeds are also run with other rates and decays, where that is asked for."""

    @property
    def runs(self) -> int:
        """All runs of a cell; those around the chosen settings choose nothing and come on top."""
        return self.trials + self.finalists * self.again + self.finals

    @property
    def search_seeds(self) -> range:
        """The seeds by which settings are chosen."""
        return range(1 + self.again)

    @property
    def final_seeds(self) -> range:
        """The seeds that the search has not seen."""
        return range(1 + self.again, 1 + self.again + self.finals)


class Settings(NamedTuple):
    """The settings of a trial."""

    trial: int
    learning_rate: float
    weight_decay: float
    momentum: float


def search_space(centre: float, decays: bool, trials: int) -> list[Settings]:
    """The settings of every trial: the first points of Sobol's sequence, the same for all.

    Learning rates and weight decays are even in the logarithm, momenta in the logarithm of what
    they leave to the gradient. The trials with the least momentum are not those with the largest
    decay.

    Args:
        centre: the middle of the learning rates.
        decays: whether there is a weight decay.
        trials: how many, a power of 2: then each setting has as many values, evenly spread.
    """
    points = qmc.Sobol(3, scramble=False).random_base2(int(math.log2(trials))) + 0.5 / trials
    for_rates, for_decays, for_momenta = points.T
    rates = centre * 10 ** (DECADES * (for_rates - 0.5))
    smallest, largest = WEIGHT_DECAYS
    share = (for_decays - OFF) / (1 - OFF)
    weight_decays = np.where(share < 0, 0, smallest * (largest / smallest) ** share) * decays
    least, most = (1 - end for end in MOMENTA[::-1])
    momenta = 1 - least * (most / least) ** for_momenta
    return [
        Settings(trial, *(float(f"{number:.4g}") for number in numbers))
        for trial, numbers in enumerate(zip(rates, weight_decays, momenta, strict=True))
    ]


def other_rates(best: Settings) -> list[Settings]:
    """The same settings with other rates."""
    return [
        best._replace(learning_rate=float(f"{best.learning_rate * factor:.4g}"))
        for factor in FACTORS
    ]


def other_decays(best: Settings, decays: bool) -> list[Settings]:
    """The same settings with other weight decays, if there is one."""
    return [best._replace(weight_decay=decay) for decay in DECAYS] if decays else []


def on_edge(best: Settings, centre: float) -> bool:
    """Whether a setting is in an outer tenth of its range: a better one may lie outside.

    There is nothing below a weight decay of 0.
    """
    rate = math.log10(best.learning_rate / centre) / DECADES
    least, most = (math.log(1 - end) for end in MOMENTA[::-1])
    momentum = (math.log(1 - best.momentum) - least) / (most - least) - 0.5
    smallest, largest = WEIGHT_DECAYS
    decay = math.log(max(best.weight_decay, smallest) / smallest, largest / smallest) - 0.5
    return max(abs(rate), abs(momentum), decay) > 0.4
