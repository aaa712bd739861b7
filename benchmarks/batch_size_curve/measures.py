"""The measures of a run; smaller is better."""

from collections.abc import Callable
import math
from typing import NamedTuple

from benchmarks.batch_size_curve.training import Outcome


class Measure(NamedTuple):
    """The number by which trials are compared, and the number reported for the best trial."""

    search: Callable[[Outcome], float]
    """Chooses the settings; never looks at the test part."""
    report: Callable[[Outcome], float]
    """The reported number, for the runs with new seeds."""
    title: str
    """The title, with `{target}` in the place of the target."""


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
