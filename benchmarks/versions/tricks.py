"""What makes a step on a CPU fast, to be taken out one by one: `--without folds tiles ...`.

A trick that saves less than 5% is not worth its lines. Each function here takes one out of the
library of the process that calls it; the numbers that a step gives stay the same.
"""

from collections.abc import Callable
import contextlib


def _tiles() -> None:
    """Sums of a large leaf by XLA, each in a call of its own."""
    from optax_largebatch.engine.reductions import cpu

    cpu._tiles = lambda statistics, arrays: None


def _folds() -> None:
    """Arrays of a middling leaf are written to memory before they are added."""
    from optax_largebatch.engine.reductions import cpu

    cpu.LEAST_FOLDED = float("inf")


def _two_kernels_of_few() -> None:
    """Each sum of a small leaf is a reduction of its own."""
    from optax_largebatch.engine.reductions import cpu

    cpu._can_be_folded = lambda statistics: False


def _pairs() -> None:
    """Each sum over tiles has kernels of its own, in place of two as a complex number."""
    from optax_largebatch.engine.reductions import tiles

    tiles._paired = tiles._single = lambda terms: terms


def _groups() -> None:
    """Each small leaf is a call of its own."""
    from optax_largebatch.engine.reductions import cpu

    cpu.MOST_OF_A_GROUP = 0


def _calls() -> None:
    """No pass is kept apart from others."""
    from optax_largebatch.engine.reductions import cpu, folds

    cpu.outlined = folds.outlined = contextlib.nullcontext


def _ratios_beside_sums() -> None:
    """What follows from norms alone is computed where it is used."""
    from optax_largebatch.engine.program import Program

    Program.with_ratios = lambda self, leaf, scalars, progress: progress


TRICKS: dict[str, Callable[[], None]] = {
    "tiles": _tiles,
    "folds": _folds,
    "two kernels of few": _two_kernels_of_few,
    "pairs": _pairs,
    "groups": _groups,
    "calls": _calls,
    "ratios beside sums": _ratios_beside_sums,
}
