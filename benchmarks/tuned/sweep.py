"""Runs what is left of a workload, one line of a table for each run."""

from collections.abc import Callable
import itertools
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from benchmarks.harness.machine import folder
from benchmarks.harness.results import COMMITTED, append, read
from benchmarks.tuned.arms import Arm
from benchmarks.tuned.cell import Cell, Job
from benchmarks.tuned.provenance import record
from benchmarks.tuned.search import Settings
from benchmarks.tuned.task import Task
from benchmarks.tuned.training import Losses, Run, compiled
from benchmarks.tuned.workloads import Workload

Prepare = Callable[[Task, Arm, int], Run]


class Row(NamedTuple):
    """A run and its result: a line of the table."""

    optimizer: str
    batches: str
    role: str
    trial: int
    learning_rate: float
    weight_decay: float
    momentum: float
    seed: int
    validation_loss: float
    test_loss: float

    @property
    def job(self) -> Job:
        """What was run."""
        return Job(self.role, Settings(*self[3:7]), self.seed)


def table_of(workload: Workload, output: Path) -> Path:
    """The table of a workload; each has its own, so that two can run side by side."""
    return output / f"{workload.name}.csv"


def committed(workload: Workload) -> list[Row]:
    """The runs of a workload in `benchmarks/results`: those of this chip, if there are any."""
    tables = sorted(COMMITTED.glob(f"*/tuned/{workload.name}.csv"))
    return read(min(tables, key=lambda path: folder() not in path.parts), Row)


def cells_of(workload: Workload, rows: list[Row]) -> dict[tuple[str, str], Cell]:
    """The cells of a workload, by optimizer and batches, with what has been run."""
    runs = {place: [] for place in workload.cells()}
    for row in rows:
        runs[row.optimizer, row.batches].append(row)
    cells = {}
    for place, own in runs.items():
        tried = [row.job.settings for row in own if row.role == "search"]
        cells[place] = cell = Cell(workload, *place, tried)
        jobs = itertools.chain.from_iterable(cell.parts())
        for row in own:
            if row.job != next(jobs, None):
                raise ValueError(
                    f"{row.optimizer} with batches {row.batches} of {workload.name} has a run that "
                    f"is not the next of its budget: {row}."
                )
            cell.results[row.job] = Losses(row.validation_loss, row.test_loss)
    return cells


def sweep(
    workload: Workload,
    output: Path,
    chosen: Callable[[str, str], bool] = lambda *place: True,
    prepare: Prepare = compiled,
) -> None:
    """Runs what is left of a workload, or of some of its cells, and appends it to its table."""
    output.mkdir(parents=True, exist_ok=True)
    path = table_of(workload, output)
    cells = cells_of(workload, read(path, Row))
    cells = [cell for place, cell in cells.items() if chosen(*place) and cell.left]
    if not cells:
        return
    record(path.with_suffix(".json"), workload)
    with tqdm(
        total=sum(cell.expected for cell in cells),
        initial=sum(len(cell.results) for cell in cells),
        desc=workload.name,
        unit="run",
    ) as progress:
        for cell in cells:
            progress.set_postfix_str(f"{cell.optimizer} {cell.batches}")
            run = prepare(workload.task(), cell.arm, workload.budget.trials)
            while left := cell.left:
                jobs = [(job.settings, job.seed) for job in left]
                for job, losses in zip(left, run(workload.plans[cell.batches], jobs), strict=True):
                    cell.results[job] = losses
                    role, settings, seed = job
                    append(path, Row(cell.optimizer, cell.batches, role, *settings, seed, *losses))
                    progress.update()
