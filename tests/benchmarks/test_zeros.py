"""Matrices that start at zero: what starts there, and runs that resume."""

import jax
import pytest

from benchmarks import zeros
from benchmarks.harness.results import COMMITTED, read
from benchmarks.tuned.adapters import Adapters
from benchmarks.tuned.search import Settings
from benchmarks.tuned.workloads import BERT, CAUSAL

pytestmark = pytest.mark.usefixtures("standard_promotion")
WAYS = ("muonh, ball of 0.25", "muonh, no bound")


def tiny():
    settings = {"muonh": Settings(7, 0.5, 0.0, 0.5)}
    plan = zeros.constant({256: 12})["256"]
    return zeros.Case(Adapters(0.5, width=8, rank=2, held_out=64), plan, settings, (0.5, 1), WAYS)


@pytest.mark.slow
def test_runs_what_is_left_and_the_ball_bounds_it(tmp_path):
    path = tmp_path / "zeros.csv"
    zeros.run(path, {"tiny": tiny})
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    assert len(lines) == 1 + len(WAYS) * (2 + 2)
    path.write_text("".join(lines[:4] + lines[6:]))
    zeros.run(path, {"tiny": tiny})
    assert sorted(path.read_text().splitlines()) == sorted(text.splitlines())
    rows = read(path, zeros.Row)
    bounded, free = (zeros.losses_of(rows, "tiny", way) for way in WAYS)
    assert all(free[seed] < bounded[seed] < 1 for seed in zeros.SEEDS)
    assert f"{sum(free.values()) / 3:.3f}" in zeros.table(rows, ["tiny"])


@pytest.mark.slow
@pytest.mark.parametrize("workload", [BERT, CAUSAL], ids=lambda workload: workload.name)
def test_the_last_matrices_of_each_layer_are_zero(workload):
    task = workload.task()
    params = zeros.with_zeros(task).init(jax.random.key(0))
    moved = {
        name.rpartition("layers/")[2]
        for name, array in zip(names(params), jax.tree.leaves(params), strict=True)
        if "kernel" in name and not array.any()
    }
    assert {name.lstrip("0123456789/") for name in moved} == {"output/kernel", "down/kernel"}


def names(params):
    paths = jax.tree_util.tree_leaves_with_path(params)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]


@pytest.mark.parametrize(
    "table", sorted(COMMITTED.glob("*/zeros.csv")), ids=lambda x: x.parent.name
)
def test_the_committed_table_is_complete(table):
    rows = read(table, zeros.Row)
    for name, make in zeros.CASES.items():
        for way in make().ways:
            assert zeros.losses_of(rows, name, way), (name, way)
