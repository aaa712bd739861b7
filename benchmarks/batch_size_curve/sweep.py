"""Runs the trials of a workload, one line of a table for each, and continues where it was.

A run to a target ends when it is there, when it diverges, or when it has had as many steps as the
best trial of its cell so far: it can then not change the minimum, so that this saves time and
nothing else. For the same reason a trial is given up when one of its runs has failed, and the
search begins near the best of the next smaller batch size.
"""

from collections.abc import Callable
import functools
import itertools
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from benchmarks.batch_size_curve.search import (
    Settings,
    from_the_middle,
    refined,
    search_space,
)
from benchmarks.batch_size_curve.training import Outcome, Run
from benchmarks.batch_size_curve.workloads import Workload
from benchmarks.harness.table import append
from benchmarks.harness.table import read as read_lines


class Row(NamedTuple):
    """A trial and its result: a line of the table."""

    workload: str
    optimizer: str
    batch_size: int
    role: str
    """`search`, or `repeat` of the best settings with another seed."""
    trial: int
    learning_rate: float
    weight_decay: float
    seed: int
    steps: float
    ended: str
    validation_loss: float
    test_loss: float

    @property
    def outcome(self) -> Outcome:
        """The result of the trial."""
        return Outcome(self.steps, self.ended, self.validation_loss, self.test_loss)


def read(path: Path) -> list[Row]:
    """The table, or nothing where there is none yet."""
    return read_lines(path, Row)


class Cell:
    """The trials of an optimizer at a batch size.

    A trial is as good as the slowest of its runs with each seed of the search, so that a rate that
    went well by luck is not taken. What is reported is run with seeds that the search has not seen.
    """

    def __init__(self, workload: Workload, optimizer: str, batch_size: int) -> None:
        self.workload, self.optimizer, self.batch_size = workload, optimizer, batch_size
        self.space = search_space(workload.centre(optimizer), workload.trials)
        self.search: list[list[Row]] = [[] for _ in self.space]
        self.repeats: list[Row] = []

    def add(self, row: Row) -> None:
        """Takes a line of the table that belongs here, and refuses one beyond the budget."""
        known = row.trial < len(self.space) and row[4:7] == self.space[row.trial]
        runs = self.search[row.trial] if known and row.role == "search" else self.repeats
        seeds = self._seeds(row.role)
        if not known or len(runs) == len(seeds) or row.seed != seeds[len(runs)]:
            raise ValueError(
                f"{self.optimizer} at batch size {self.batch_size} of {self.workload.name} has a "
                f"trial that is not in its budget: {row}."
            )
        runs.append(row)
        coarse = len(self.space) == self.workload.trials
        if coarse and self.best and all(map(self.settled, range(len(self.space)))):
            fine = refined(self.best, self.workload.trials, self.workload.fine_trials)
            self.space += fine
            self.search += [[] for _ in fine]

    def score(self, trial: int) -> float:
        """The steps of the trial's worst run; infinite while runs are left."""
        values = self._values(trial)
        return max(values) if len(values) == self.workload.search_seeds else math.inf

    def settled(self, trial: int) -> bool:
        """Whether more runs could not change the score."""
        values = self._values(trial)
        return len(values) == self.workload.search_seeds or math.inf in values

    def _values(self, trial: int) -> list[float]:
        return [row.outcome.steps for row in self.search[trial]]

    @property
    def best(self) -> Settings | None:
        """The best trial so far, of equal ones that with the smallest rate; None without any."""
        chosen = min(self.space, key=lambda own: (self.score(own.trial), own.learning_rate))
        return chosen if self.score(chosen.trial) < math.inf else None

    def is_smaller_than(self, other: "Cell") -> bool:
        """Whether this cell is of the same optimizer, at a smaller batch size."""
        return self.optimizer == other.optimizer and self.batch_size < other.batch_size

    @property
    def middle(self) -> int:
        """The trial of the coarse search that is nearest to the best."""
        assert self.best is not None
        rates = [own.learning_rate for own in self.space[: self.workload.trials]]
        distances = np.abs(np.log(rates) - math.log(self.best.learning_rate))
        return int(distances.argmin())

    @property
    def complete(self) -> bool:
        """Whether the whole budget has been spent."""
        if not all(map(self.settled, range(len(self.space)))):
            return False
        return self.best is None or len(self.repeats) == self.workload.seeds

    def run(self, run: Run, middle: int, done: Callable[[Row], None]) -> None:
        """Runs what is left; `middle` is the trial to begin with."""
        coarse = from_the_middle(self.workload.trials, middle)
        for trial in itertools.chain(coarse, itertools.count(self.workload.trials)):
            if trial == len(self.space):
                break
            while not self.settled(trial):
                most = min(map(self.score, range(len(self.space))))
                self._run(run, "search", self.space[trial], most, done)
        while not self.complete and self.best is not None:
            self._run(run, "repeat", self.best, math.inf, done)

    def _seeds(self, role: str) -> range:
        """The remaining runs of the search or, after them, of the repeats."""
        first = self.workload.search_seeds
        return range(first) if role == "search" else range(first, first + self.workload.seeds)

    def _run(
        self,
        run: Run,
        role: str,
        settings: Settings,
        most_steps: float,
        done: Callable[[Row], None],
    ) -> None:
        runs = self.search[settings.trial] if role == "search" else self.repeats
        seed = self._seeds(role)[len(runs)]
        outcome = run(settings, seed, self.batch_size, most_steps)
        place = (self.workload.name, self.optimizer, self.batch_size, role)
        row = Row(*place, *settings, seed, *rounded(outcome))
        self.add(row)
        done(row)


def rounded(outcome: Outcome) -> Outcome:
    """The result with losses of six digits, as it is written."""
    losses = (float(f"{loss:.6g}") for loss in (outcome.validation_loss, outcome.test_loss))
    return Outcome(outcome.steps, outcome.ended, *losses)


def cells_of(workload: Workload, rows: list[Row]) -> dict[tuple[str, int], Cell]:
    """The cells of a workload, by optimizer and batch size, with what has been run."""
    cells = {place: Cell(workload, *place) for place in workload.cells()}
    for row in rows:
        if row.workload == workload.name:
            cells[row.optimizer, row.batch_size].add(row)
    return cells


def sweep(
    workload: Workload, path: Path, chosen: Callable[[str, int], bool] = lambda *place: True
) -> None:
    """Runs what is left of a workload, or of some of its cells, and appends it to the table."""
    cells = cells_of(workload, read(path))
    prepare = functools.cache(functools.partial(workload.prepare, workload.target))
    places = [place for place in cells if chosen(*place)]
    with tqdm(places, desc=workload.name, unit="cell") as progress:
        for optimizer, batch_size in progress:
            progress.set_postfix_str(f"{optimizer} {batch_size}")
            cell = cells[optimizer, batch_size]
            if not cell.complete:
                smaller = [own for own in cells.values() if own.is_smaller_than(cell) and own.best]
                middle = smaller[-1].middle if smaller else workload.trials // 2
                cell.run(prepare(optimizer), middle, functools.partial(append, path))
