"""Runs the trials of a workload, one line of a table for each, and continues where it was.

A trial ends when it is at the target, when it diverges, or when it has had as many steps as the
best trial of its cell so far: it can then not change the minimum, so that this saves time and
nothing else. For the same reason trials begin near the best of the next smaller batch size.
"""

from collections import defaultdict
from collections.abc import Callable
import csv
import functools
import math
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from benchmarks.batch_size_curve.search import Settings, from_the_middle, search_space
from benchmarks.batch_size_curve.training import Outcome, Run
from benchmarks.batch_size_curve.workloads import Workload


class Row(NamedTuple):
    """A trial and what came of it: a line of the table."""

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


def read(path: Path) -> list[Row]:
    """The table, or nothing where there is none yet. A line that was cut off is cut out."""
    if not path.exists():
        return []
    text = path.read_text()
    if not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
        path.write_text(text)
    types = Row.__annotations__
    return [
        Row(**{name: types[name](value) for name, value in line.items()})
        for line in csv.DictReader(text.splitlines())
    ]


def append(path: Path, row: Row) -> None:
    """Writes a line."""
    begins = not path.exists() or path.stat().st_size == 0
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if begins:
            writer.writerow(Row._fields)
        writer.writerow(row)


def best(search: list[Row]) -> Row | None:
    """The trial that took the fewest steps, and of several the one that got further; or none."""
    reached = [row for row in search if math.isfinite(row.steps)]
    return min(reached, key=lambda row: (row.steps, row.validation_loss), default=None)


class Cell:
    """The trials of an optimizer at a batch size."""

    def __init__(self, workload: Workload, optimizer: str, batch_size: int) -> None:
        self.workload, self.optimizer, self.batch_size = workload, optimizer, batch_size
        self.space = search_space(workload.centre(optimizer), workload.trials)
        self.search: dict[int, Row] = {}
        self.repeats: dict[int, Row] = {}

    def add(self, row: Row) -> None:
        """Takes a line of the table that belongs here."""
        if row.role == "search":
            self.search[row.trial] = row
        else:
            self.repeats[row.seed] = row

    @property
    def best(self) -> Row | None:
        """The best of the search so far."""
        return best(list(self.search.values()))

    @property
    def left(self) -> int:
        """How many trials are left, at most."""
        searched = self.workload.trials - len(self.search)
        never = not searched and self.best is None
        return 0 if never else searched + self.workload.seeds - 1 - len(self.repeats)

    def run(self, run: Run, middle: int, done: Callable[[Row], None]) -> None:
        """Runs what is left; `middle` is the trial to begin with."""
        for trial in from_the_middle(self.workload.trials, middle):
            if trial not in self.search:
                most = self.best.steps if self.best else math.inf
                self._run(run, "search", self.space[trial], 0, most, done)
        chosen = self.best
        for seed in range(1, self.workload.seeds if chosen else 0):
            if seed not in self.repeats:
                self._run(run, "repeat", self.space[chosen.trial], seed, math.inf, done)

    def _run(
        self,
        run: Run,
        role: str,
        settings: Settings,
        seed: int,
        most_steps: float,
        done: Callable[[Row], None],
    ) -> None:
        outcome = run(settings, seed, self.batch_size, most_steps)
        place = (self.workload.name, self.optimizer, self.batch_size, role)
        row = Row(*place, *settings, seed, *rounded(outcome))
        self.add(row)
        done(row)


def rounded(outcome: Outcome) -> Outcome:
    """With losses of six digits, as they are written."""
    losses = (float(f"{loss:.6g}") for loss in (outcome.validation_loss, outcome.test_loss))
    return Outcome(outcome.steps, outcome.ended, *losses)


def sweep(workload: Workload, path: Path) -> None:
    """Runs what is left of a workload and appends it to the table."""
    cells = {place: Cell(workload, *place) for place in workload.cells()}
    for row in read(path):
        if row.workload == workload.name:
            cells[row.optimizer, row.batch_size].add(row)
    prepare = functools.cache(functools.partial(workload.prepare, workload.target))
    middles: dict[str, int] = defaultdict(lambda: workload.trials // 2)
    total = len(cells) * (workload.trials + workload.seeds - 1)
    left = sum(cell.left for cell in cells.values())
    with tqdm(desc=workload.name, total=total, initial=total - left) as progress:

        def done(row: Row) -> None:
            append(path, row)
            progress.update()

        for (optimizer, batch_size), cell in cells.items():
            progress.set_postfix_str(f"{optimizer} {batch_size}")
            if cell.left:
                cell.run(prepare(optimizer), middles[optimizer], done)
            if cell.best:
                middles[optimizer] = cell.best.trial
