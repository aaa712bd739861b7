"""Versions beside each other: each process has its own library and devices, and ends in time."""

import csv
import os
from pathlib import Path
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from benchmarks.versions.__main__ import change
from benchmarks.versions.configurations import Configuration, Process
from benchmarks.versions.source_trees import ROOT, git, source_tree

in_git = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="there are no revisions")


@pytest.fixture(scope="module")
def other_version(tmp_path_factory):
    """A source tree whose library can be told from this one, and that has benchmarks, too."""
    root = tmp_path_factory.mktemp("other")
    shutil.copytree(ROOT / "optax_largebatch", root / "optax_largebatch")
    with (root / "optax_largebatch" / "__init__.py").open("a") as file:
        file.write('\n__version__ = "another one"\n')
    (root / "benchmarks").mkdir()
    (root / "benchmarks" / "__init__.py").write_text("raise AssertionError\n")
    return root


def test_change_is_taken_turn_by_turn():
    before = np.array([1.0, 2.0, 4.0])
    expected = {"change": 50.0, "change_low": 50.0, "change_high": 50.0}
    assert change("change", 1.5 * before, before) == expected


@pytest.mark.slow
@pytest.mark.nightly
def test_takes_the_library_of_its_version_and_its_devices(other_version):
    with Process(Configuration("other", other_version, 2), "tiny", "lamb") as process:
        assert process.compiled["machine"].startswith("2 x cpu")
        assert process.compiled["machine"].endswith("optax_largebatch another one")
        assert len(process.run()) == 2
        assert min(process.run()) > 0
    assert process.process.poll() == -signal.SIGKILL


@in_git
def test_a_revision_is_checked_out_and_removed():
    with source_tree("HEAD") as root:
        assert root != ROOT
        assert (root / "optax_largebatch" / "__init__.py").exists()
        assert str(root) in git("worktree", "list")
    assert not root.exists()
    assert str(root) not in git("worktree", "list")


def command(*options):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    arguments = [sys.executable, "-m", "benchmarks.versions", "--tree", "tiny", *options]
    return subprocess.Popen(
        [*arguments, "--optimizer", "lamb"], cwd=ROOT, env=environment, text=True
    )


@in_git
@pytest.mark.slow
@pytest.mark.nightly
def test_working_tree_on_one_device_and_on_eight(tmp_path):
    options = ["--versions", ".", "--devices", "1", "8", "--rounds", "2"]
    assert command(*options, "--output", str(tmp_path)).wait(timeout=120) == 0
    text = (tmp_path / "versions.csv").read_text()
    one, eight = csv.DictReader(text.splitlines())
    for row, devices in ((one, 1), (eight, 8)):
        assert (row["tree"], row["optimizer"], row["version"]) == ("tiny", "lamb", ".")
        assert row["machine"].startswith(f"{row['devices']} x cpu")
        assert row["devices"] == str(devices)
        names = ("ratio_low", "ratio", "ratio_high", "trace_s", "compile_s", "temporaries_percent")
        low, median, high, *others = (float(row[name]) for name in names)
        assert 0 < low <= median <= high
        assert min(others) > 0
        # The first of a number of devices is what the others are compared with.
        assert float(row["change_of_version"]) == 0
    assert float(one["change"]) == 0


def children(process):
    """The processes that it has started and that live."""
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in listed]


def lives(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return result


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.skipif(
    not Path(f"/proc/self/task/{os.getpid()}/children").exists(), reason="they are found in /proc"
)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_command(how):
    if how == signal.SIGINT and signal.getsignal(how) == signal.SIG_IGN:
        pytest.skip("a shell has started the tests in the background, where Ctrl-C is ignored")
    running = command("--versions", ".", "--rounds", "1000000")
    try:
        (worker,) = wait_for(lambda: [c for c in children(running) if lives(c)])
        time.sleep(1)  # it is importing or compiling, or takes turns
        running.send_signal(how)
        assert running.wait(timeout=60) != 0
        wait_for(lambda: not lives(worker))
    finally:
        running.kill()
        running.wait()
