"""What a table of runs says: the chosen settings of each cell, and its losses with new seeds."""

from typing import NamedTuple

import numpy as np

from benchmarks.tuned.cell import Cell
from benchmarks.tuned.search import Settings, on_edge
from benchmarks.tuned.sweep import Row, cells_of
from benchmarks.tuned.workloads import Workload


class Measured(NamedTuple):
    """An optimizer, tuned for some batches."""

    settings: Settings
    searched: dict[Settings, float]
    """The validation losses of all trials, with the first seed."""
    losses: dict[int, float]
    """The test losses by seed."""
    edge: bool
    """Whether the rate is near an end of its range."""

    @property
    def mean(self) -> float:
        """The mean over the seeds."""
        return float(np.mean(list(self.losses.values())))


class Curve(NamedTuple):
    """The loss with other values of a setting, in the place of the chosen one."""

    chosen: float
    losses: dict[float, float]
    """Means over the same seeds, by value in increasing order; infinite where one has diverged."""


Results = dict[str, dict[str, Measured]]


def measured(workload: Workload, rows: list[Row]) -> Results:
    """The cells whose whole budget has been spent, by optimizer and name of the batches."""
    results: Results = {}
    for (optimizer, batches), cell in cells_of(workload, rows).items():
        if cell.is_measured:
            own = Measured(
                cell.chosen,
                cell.searched,
                cell.losses(cell.chosen, "final"),
                on_edge(cell.chosen, cell.arm.centre),
            )
            results.setdefault(optimizer, {})[batches] = own
    return results


def curves(workload: Workload, rows: list[Row], batches: str, role: str) -> dict[str, Curve]:
    """The losses around the chosen settings: `role` is `rate` or `decay`."""
    found = {}
    for (optimizer, own), cell in cells_of(workload, rows).items():
        if own == batches and not cell.left and any(job.role == role for job in cell.results):
            found[optimizer] = _curve(cell, role)
    return found


def _curve(cell: Cell, role: str) -> Curve:
    field = {"rate": "learning_rate", "decay": "weight_decay"}[role]
    seeds = cell.budget.final_seeds[: cell.budget.around]
    others = {job.settings for job in cell.results if job.role == role}
    losses = {getattr(own, field): cell.losses(own, role) for own in others}
    chosen = getattr(cell.chosen, field)
    losses[chosen] = cell.losses(cell.chosen, "final")
    means = {value: float(np.mean([own[seed] for seed in seeds])) for value, own in losses.items()}
    return Curve(chosen, dict(sorted(means.items())))
