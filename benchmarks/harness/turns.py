"""Contenders take their steps in turns, and are compared turn by turn.

A shared machine is slow at one time and fast at another: only the ratios of times that were taken
beside each other mean something.
"""

from collections.abc import Hashable, Mapping
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from tqdm import tqdm

Name = TypeVar("Name", bound=Hashable)


class Contender(Protocol):
    """Something to be timed."""

    def run(self) -> float | tuple[float, ...]:
        """Takes a turn, and returns how many seconds it took, or how many each part of it."""
        ...


def in_turns(
    contenders: Mapping[Name, Contender],
    rounds: int,
    *,
    left_out: int = 1,
    shuffled: bool = False,
    description: str | None = None,
) -> dict[Name, np.ndarray]:
    """The seconds of each contender in each round, (rounds,) or (rounds, parts).

    Args:
        contenders: by name; each takes one turn in every round.
        rounds: those that are returned.
        left_out: rounds before them, in which the contenders touch their memory for the first time.
        shuffled: the order within a round is drawn, so that what runs after what does not matter.
        description: stands beside the progress; None shows none.
    """
    names = list(contenders)
    seconds: dict[Name, list[float | tuple[float, ...]]] = {name: [] for name in names}
    orders = np.random.default_rng(0)
    for _ in tqdm(range(left_out + rounds), desc=description, disable=description is None):
        order = orders.permutation(len(names)) if shuffled else range(len(names))
        for index in order:
            seconds[names[index]].append(contenders[names[index]].run())
    return {name: np.array(turns[left_out:]) for name, turns in seconds.items()}


class Ratio(NamedTuple):
    """The ratio of times to those of a baseline, over all turns."""

    median: float
    low: float
    high: float
    """A tenth of the turns is below `low`, and a tenth above `high`."""

    def as_row(self, digits: int) -> dict[str, float]:
        """The entries of every table of ratios."""
        median, low, high = (round(value, digits) for value in self)
        return {"ratio": median, "ratio_low": low, "ratio_high": high}


def ratio(seconds: np.ndarray, baseline: np.ndarray | float) -> Ratio:
    """Times divided by those of the baseline, turn by turn."""
    low, median, high = map(float, np.quantile(seconds / baseline, (0.1, 0.5, 0.9)))
    return Ratio(median, low, high)
