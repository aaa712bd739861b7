"""Each notebook runs from its first cell to its last, and comes to the numbers that it tells of."""

import importlib.util
from pathlib import Path
import re
import textwrap
import tomllib

import pytest

nbformat = pytest.importorskip("nbformat")
ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

# Run after the last cell of the notebook, on its variables.
KEY_NUMBERS = {
    "01_quickstart": """
        assert min(test_accuracy.values()) > 0.94, test_accuracy
        steps = {name: steps_to_target(losses) for name, (_, _, losses, _) in runs.items()}
        assert 5 < max(steps["muon"]) < min(steps["adamw"]) < 25, steps
        assert max(steps["adamw"]) < max(steps["lamb"]) < 40, steps
        assert max(fractions["adamw"]) > 4 * min(fractions["adamw"]), fractions
        assert max(fractions["lamb"]) < 1.01 * min(fractions["lamb"]), fractions
        assert largest < 1e-5, largest
        """,
    "02_bert_lans": """
        assert losses[-1] < 2.3 < entropy < losses[0], (losses, entropy)
        assert accuracies[-1] > 0.42, accuracies
        assert all(np.all(np.isfinite(own)) for own in history.values())
        assert runs["adamw"][2][0][-1] < entropy, runs["adamw"][2]
        assert of_momentum["layers/up/kernel"].shape == (STEPS, 4)
        """,
    "03_many_devices": """
        assert len(differences) == 7, differences
        for name, value in differences.items():
            assert value > 0.1 if name in wrong else value < 1e-5, (name, value)
        assert counts["lamb"] == counts["lamb, with partition_specs"] == 1, counts
        assert counts["optax.lamb"] > 1, counts
        """,
    "04_choose_your_batch_size": """
        assert 10 < float(noise.noise_scale[-1]) < 1000
        steady, swinging = (own[-100:] for own in (losses, constant_losses))
        assert steady.max() < 1.6 * steady.min() < swinging.max() / 1.2, (steady, swinging)
        assert 50 < fit.critical_batch_size < 1000, fit
        assert not any(measured.at_edge), measured.summary()
        """,
}


def read(path):
    return nbformat.read(path, as_version=4)


def test_each_has_its_key_numbers():
    assert {path.stem for path in NOTEBOOKS} == set(KEY_NUMBERS)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("default")  # of Jupyter, in this process
def test_runs_and_comes_to_its_numbers(path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = read(path)
    checks = textwrap.dedent(KEY_NUMBERS[path.stem])
    notebook.cells.append(nbformat.v4.new_code_cell(checks))
    nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3").execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
class TestInColab:
    def test_a_badge_opens_it(self, path):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        address = project["urls"]["Repository"].removeprefix("https://github.com/")
        opens = f"https://colab.research.google.com/github/{address}/blob/main/notebooks/"
        assert f"]({opens}{path.name})" in read(path).cells[0].source

    @pytest.mark.parametrize("installed", [True, False])
    def test_the_first_cell_installs_what_is_missing(self, path, installed, monkeypatch):
        first = next(cell for cell in read(path).cells if cell.cell_type == "code").source
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed or None)
        calls = []
        exec(re.sub("%pip (.*)", r"pip('\1')", first), {"pip": calls.append})
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        wanted = f"{project['name']}[examples] @ git+{project['urls']['Repository']}"
        assert calls == ([] if installed else [f'install --quiet "{wanted}"'])

    def test_shows_what_a_loop_logs(self, path):
        code = "".join(cell.source for cell in read(path).cells if cell.cell_type == "code")
        assert "lb.step_metrics(" in code

    def test_is_kept_without_outputs(self, path):
        code = [cell for cell in read(path).cells if cell.cell_type == "code"]
        assert not any(cell.outputs or cell.execution_count for cell in code)
