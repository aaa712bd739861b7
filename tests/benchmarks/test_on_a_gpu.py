"""`benchmarks/on_a_gpu.sh`, which no test can run on a GPU: every line of its commands is right."""

import argparse
import importlib
import os
import re
import shlex
import subprocess
import sys

import pytest

from benchmarks.harness.trees import TREES
from tests.size import ROOT

SCRIPT = ROOT / "benchmarks" / "on_a_gpu.sh"
TEXT = SCRIPT.read_text().replace("\\\n", " ")
COMMANDS = re.findall(r"^part \d+ (benchmarks\.\w+) (.*)", TEXT, re.MULTILINE)
TREES_OF = [shlex.split(found) for found in re.findall(r"\btrees=\(([^)]*)\)", TEXT)]


def test_is_a_script_of_benchmarks():
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    assert os.access(SCRIPT, os.X_OK)
    names = [
        "device_time",
        "step_cost",
        "switch_times",
        "muon_step",
        "training_step",
        "accumulation_cost",
    ]
    assert [module for module, _ in COMMANDS] == [f"benchmarks.{name}" for name in names]


@pytest.mark.parametrize("trees", TREES_OF, ids=" ".join)
@pytest.mark.parametrize(("module", "options"), COMMANDS, ids=[x for x, _ in COMMANDS])
def test_a_benchmark_takes_its_options(module, options, trees, monkeypatch):
    values = {
        "${trees[@]}": shlex.join(trees), "${trees[0]}": trees[0], "${switched[@]}": "small",
        "${trained[@]}": "muon muonh", "$layers": "1", "$width": "32", "$turns": "4", "$batch": "8",
    }  # fmt: skip
    for variable, value in values.items():
        options = options.replace(f'"{variable}"', value)
    parse = argparse.ArgumentParser.parse_args
    taken = []

    def parse_and_end(parser):
        taken.append(parse(parser))
        raise SystemExit

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_end)
    monkeypatch.setattr(sys, "argv", [module, *shlex.split(options), "--rounds", "2"])
    with pytest.raises(SystemExit):
        importlib.import_module(module).main()
    assert set(getattr(taken[0], "tree", [])) <= set(TREES)
    assert taken[0].rounds == 2


@pytest.mark.slow
@pytest.mark.nightly
def test_rehearsal(tmp_path):
    """All of it on a CPU, and the tables that a card's folder will hold."""
    subprocess.run(
        [SCRIPT, "--rehearse"],
        env=os.environ | {"PYTHON": sys.executable, "OUTPUT": str(tmp_path)},
        check=True,
        timeout=600,
    )
    assert "passed" in (tmp_path / "tests.txt").read_text()
    tables = {f"{module.removeprefix('benchmarks.')}.csv" for module, _ in COMMANDS}
    assert tables | {"bandwidth.csv"} <= {path.name for path in tmp_path.iterdir()}
    head, *lines = (tmp_path / "bandwidth.csv").read_text().splitlines()
    assert head.startswith("tree,optimizer,milliseconds,gigabytes_per_second,of_a_copy")
    assert len(lines) >= 5
