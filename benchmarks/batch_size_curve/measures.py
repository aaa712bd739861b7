"""What a run is measured by: the smaller the better."""

from collections.abc import Callable
import math
from typing import NamedTuple

from benchmarks.batch_size_curve.training import Outcome


class Measure(NamedTuple):
    """How trials are compared, and what is reported of the best."""

    search: Callable[[Outcome], float]
    """Chooses the settings; never looks at the test part."""
    report: Callable[[Outcome], float]
    """Of the runs with new seeds."""
    title: str
    """With `{target}` where that belongs."""


def _finished(outcome: Outcome, loss: float) -> float:
    return loss if outcome.ended == "finished" else math.inf


STEPS = Measure(
    search=lambda outcome: outcome.steps,
    report=lambda outcome: outcome.steps,
    title="steps to a validation loss of {target:g}",
)
FINAL_LOSS = Measure(
    search=lambda outcome: _finished(outcome, outcome.validation_loss),
    report=lambda outcome: _finished(outcome, outcome.test_loss),
    title="test loss at the end of the schedule",
)
