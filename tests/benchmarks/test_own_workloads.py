"""The protocol with an optimizer and a task that no table of ours has: those of the guide."""

import re

import pytest

from benchmarks import transfer
from benchmarks.harness.results import RUNS, read
from benchmarks.tuned import __main__ as tuned
from benchmarks.tuned.workloads import WORKLOADS, workloads_in
from optax_largebatch.plans.law import LAWS, Power
from tests.size import ROOT

pytestmark = pytest.mark.usefixtures("standard_promotion")

GUIDE = ROOT / "docs" / "guides" / "compare_your_optimizer.md"
SHORT = {"trials=16": "trials=4", "32: 128": "32: 8", "128: 32": "128: 4"}


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The file that the guide has the reader save, with shorter runs."""
    code = "".join(re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.M | re.DOTALL)[:3])
    for long, short in SHORT.items():
        assert long in code
        code = code.replace(long, short)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(code)
    return tmp_path / "own.py"


def test_the_workload_of_the_guide_is_new(file):
    (own,) = workloads_in(file).values()
    assert own.name not in WORKLOADS
    assert {*own.optimizers} - {*own.arms} == set()
    assert not any("row_norm" in workload.optimizers for workload in WORKLOADS.values())
    law = transfer.law_of(own, "row_norm", "law")
    assert law.learning_rate == Power(0.5, -0.32)
    assert law.eps == Power()
    assert transfer.law_of(own, "adamw", "law") == LAWS["muonh"]
    assert transfer.law_of(own, "row_norm", "kept") == LAWS["kept"]
    assert transfer.law_of(own, "row_norm", "momentum kept") == law._replace(momentum=Power())


def test_names_that_it_does_not_have(file, capsys):
    for option in ("--workload", "--optimizer", "--batch-size"):
        with pytest.raises(SystemExit):
            tuned.main(["--file", str(file), option, "other"])
        assert "other: choose from" in capsys.readouterr().err


@pytest.mark.slow
def test_the_commands_of_the_guide(file):
    folder = RUNS / "own"
    moved = ["--file", str(file), "--way", "law", "kept"]
    tuned.main(["--file", str(file), "--batch-size", "32"])
    transfer.main(moved)  # before the search at the large batch
    assert "| 32 to 128 | `row_norm` |\n" in (folder / "transfer.md").read_text()
    tuned.main(["--file", str(file)])
    transfer.main(moved)
    assert (folder / "waves.png").exists()
    assert "| minus `adamw` | 32, 8 steps | 128, 4 steps |" in (folder / "report.md").read_text()
    rows = read(folder / "transfer.csv", transfer.Row)
    assert {row.place[1:] for row in rows} == {
        (optimizer, "32", "128", way)
        for optimizer in ("row_norm", "adamw")
        for way in ("law", "kept")
    }
    assert "| 32 to 128 | `row_norm` | " in (folder / "transfer.md").read_text()
    table = (folder / "waves.csv").read_bytes()
    tuned.main(["--file", str(file)])
    assert (folder / "waves.csv").read_bytes() == table
