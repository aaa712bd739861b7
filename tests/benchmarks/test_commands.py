"""The benchmarks run as modules and as files, and write the tables that are committed."""

import os
import subprocess
import sys

import pytest

from tests.size import ROOT

COMMITTED = ROOT / "benchmarks" / "results"


def run(*command):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, check=True, timeout=300)


def columns(path):
    return path.read_text().partition("\n")[0]


def test_writes_the_committed_table(tmp_path):
    run("benchmarks/critical_batch_of_published_runs.py", "--output", str(tmp_path))
    name = "critical_batch_of_published_runs.csv"
    assert (tmp_path / name).read_bytes() == (COMMITTED / name).read_bytes()


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("step_cost", "--tree tiny --optimizer lamb --rounds 2"),
        ("accumulation_cost", "--tree tiny --rounds 2"),
        ("sharded_step", "--width 16 --rounds 2"),
    ],
)
def test_has_the_columns_of_the_committed_table(name, options, tmp_path):
    run("-m", f"benchmarks.{name}", *options.split(), "--output", str(tmp_path))
    committed = COMMITTED / "cpu-2-cores" / f"{name}.csv"
    assert columns(tmp_path / f"{name}.csv") == columns(committed)
