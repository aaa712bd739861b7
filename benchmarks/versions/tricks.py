"""What makes a step on a CPU fast, to be taken out one by one: `--without tiles groups ...`.

A trick that saves less than 5% is not worth its lines. Each function here takes one out of the
library of the process that calls it; the numbers that a step gives stay the same.
"""

from collections.abc import Callable
import dataclasses
from typing import Any


def _tiles() -> None:
    """Sums of a large leaf by XLA, each in a call of its own."""
    from optax_largebatch.engine import sums

    sums._tiles = lambda statistics, arrays: None


def _written_terms() -> None:
    """Arrays of a small leaf are not written to memory before they are added."""
    from optax_largebatch.engine import sums

    sums.MIN_YNN_SIZE = float("inf")


def _pairs() -> None:
    """Each sum over tiles has kernels of its own, in place of two as a complex number."""
    from optax_largebatch.engine import tiles

    tiles._paired = tiles._single = lambda terms: terms


def _groups() -> None:
    """Each small leaf is a call of its own."""
    _switch(group_size=0)


def _calls() -> None:
    """No pass is kept apart from others."""
    _switch(no_inline=False)


def _switch(**values: Any) -> None:
    """Changes the plan of one CPU."""
    from optax_largebatch.engine import execution_plans

    cpu = dataclasses.replace(execution_plans.ONE_CPU, **values)
    execution_plans.ON_ONE_DEVICE["cpu"] = cpu


TRICKS: dict[str, Callable[[], None]] = {
    "tiles": _tiles,
    "pairs": _pairs,
    "written terms": _written_terms,
    "groups": _groups,
    "calls": _calls,
}
