"""Runs that change at their half: one that does not is that of a single program."""

import itertools

import pytest

from benchmarks.changed_run import CASES, SEEDS, WAYS, Change, Row
from benchmarks.harness.results import COMMITTED, read
from benchmarks.tuned.adapters import Adapters
from benchmarks.tuned.arms import ARMS
from benchmarks.tuned.schedules import constant
from benchmarks.tuned.search import Settings
from benchmarks.tuned.training import compiled

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.mark.slow
def test_what_changes_and_what_does_not():
    task, plan = Adapters(0.5, width=8, rank=2, held_out=64), constant({256: 12})["256"]
    settings = {name: Settings(7, 0.05, 0.0, 0.5) for name in ("adamw", "muonh")}

    def test_loss(way):
        return Change(task, plan, settings, way).run(0)[-1]

    run = compiled(task, ARMS["adamw"], side_by_side=1)
    (unchanged,) = run(plan, [(settings["adamw"], 0)])
    assert test_loss(WAYS["adamw"]) == pytest.approx(unchanged.test, rel=1e-4)
    others = {test_loss(way) for name, way in WAYS.items() if name.startswith("adamw,")}
    assert len(others | {unchanged.test}) == 3


def test_the_committed_table_is_complete():
    rows = read(COMMITTED / "cpu-2-cores" / "changed_run.csv", Row)
    assert sorted(row[:3] for row in rows) == sorted(itertools.product(CASES, WAYS, SEEDS))
