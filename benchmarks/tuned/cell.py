"""A cell: an optimizer and the batches of a run, with all runs that it needs, one after the other.

What comes next follows from the results so far alone, so a sweep that was interrupted goes on as if
it had not been.
"""

from collections.abc import Iterator, Sequence
import functools
import math
from typing import NamedTuple

from benchmarks.tuned.search import Settings, other_decays, other_rates, search_space
from benchmarks.tuned.training import Losses
from benchmarks.tuned.workloads import Workload


class Job(NamedTuple):
    """A run, and what it is for."""

    role: str
    """`search`, `again` for the best with further seeds, `final` for the chosen settings with new
    seeds, `rate` and `decay` for other ones in the place of the chosen."""
    settings: Settings
    seed: int


class Cell:
    """The runs of an optimizer with the batches that a plan has.

    A search that is complete stays what it was: `tried` are its settings, even if `search_space`
    has become another one since.
    """

    def __init__(
        self, workload: Workload, optimizer: str, batches: str, tried: Sequence[Settings] = ()
    ) -> None:
        self.workload, self.optimizer, self.batches = workload, optimizer, batches
        self.arm, self.budget = workload.arms[optimizer], workload.budget
        self.space = list(tried)
        if len(tried) != self.budget.trials:
            self.space = search_space(self.arm.centre, self.arm.decays, self.budget.trials)
        self.results: dict[Job, Losses] = {}

    def parts(self) -> Iterator[list[Job]]:
        """All runs, in order. The runs of a part do not depend on each other.

        To go on after a part, its results must be there.
        """
        first, *further = self.budget.search_seeds
        yield [Job("search", settings, first) for settings in self.space]
        yield [Job("again", settings, seed) for settings in self.finalists for seed in further]
        chosen, seeds = self.chosen, self.budget.final_seeds
        yield [Job("final", chosen, seed) for seed in seeds]
        if self.batches in self.workload.around:
            others = [("rate", x) for x in other_rates(chosen)]
            others += [("decay", x) for x in other_decays(chosen, self.arm.decays)]
            seeds = seeds[: self.budget.around]
            yield [Job(role, settings, seed) for seed in seeds for role, settings in others]

    @property
    def expected(self) -> int:
        """The number of all runs."""
        if self.batches not in self.workload.around:
            return self.budget.runs
        others = len(other_rates(self.space[0])) + len(other_decays(self.space[0], self.arm.decays))
        return self.budget.runs + self.budget.around * others

    @property
    def left(self) -> list[Job]:
        """What is left of the first part that is not complete."""
        for part in self.parts():
            if left := [job for job in part if job not in self.results]:
                return left
        return []

    @property
    def searched(self) -> dict[Settings, float]:
        """The validation losses of all trials, with the first seed."""
        first = self.budget.search_seeds[0]
        return {x: self.results[Job("search", x, first)].validation for x in self.space}

    @functools.cached_property
    def finalists(self) -> list[Settings]:
        """The best trials by the first seed."""
        searched = self.searched
        ranked = sorted(searched, key=lambda own: _or_infinite(searched[own]))
        return ranked[: self.budget.finalists]

    @functools.cached_property
    def chosen(self) -> Settings:
        """The finalist with the least validation loss, in the mean over the seeds of the search."""
        searched, further = self.searched, self.budget.search_seeds[1:]

        def score(own: Settings) -> float:
            again = [self.results[Job("again", own, seed)].validation for seed in further]
            return sum(map(_or_infinite, [searched[own], *again]))

        return min(self.finalists, key=score)

    @property
    def is_measured(self) -> bool:
        """Whether the whole budget has been spent; runs around the chosen settings may be left."""
        return sum(job.role == "final" for job in self.results) == self.budget.finals

    def losses(self, settings: Settings, role: str) -> dict[int, float]:
        """The test losses of these settings by seed."""
        return {
            job.seed: _or_infinite(own.test)
            for job, own in self.results.items()
            if job.role == role and job.settings == settings
        }


def _or_infinite(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf
