"""Each notebook runs from its first cell to its last, and comes to the numbers that it tells of."""

import importlib.util
import re
import tomllib

import pytest

from tests.notebooks.key_numbers import KEY_NUMBERS
from tests.size import ROOT

nbformat = pytest.importorskip("nbformat")
run_notebooks = pytest.importorskip("docs.run_notebooks")
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ADDRESS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]


def read(path):
    return nbformat.read(path, as_version=4)


def code_of(path):
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def test_each_has_its_key_numbers():
    assert {path.stem for path in NOTEBOOKS} == set(KEY_NUMBERS)


@pytest.mark.slow
@pytest.mark.nightly  # the build of the site runs them with the same checks
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("default")  # of Jupyter, in this process
def test_runs_and_comes_to_its_numbers(path, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    run_notebooks.executed(path)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
class TestInColab:
    def test_a_badge_opens_it(self, path):
        opens = ADDRESS.replace("github.com", "colab.research.google.com/github")
        first, *_ = read(path).cells
        assert f"]({opens}/blob/main/notebooks/{path.name})" in first.source

    @pytest.mark.parametrize("installed", [True, False])
    def test_the_first_cell_installs_what_is_missing(self, path, installed, monkeypatch):
        first, *_ = code_of(path)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed or None)
        calls = []
        exec(re.sub("%pip (.*)", r"pip('\1')", first.source), {"pip": calls.append})
        wanted = f'install --quiet "optax-largebatch[examples] @ git+{ADDRESS}"'
        assert calls == ([] if installed else [wanted])

    def test_shows_what_a_loop_logs(self, path):
        assert any("lb.step_metrics(" in cell.source for cell in code_of(path))

    def test_is_kept_with_the_outputs_of_its_code(self, path):
        """As `make notebooks` writes them: by this code, from the first cell to the last."""
        notebook, code = read(path), code_of(path)
        kinds = {output.output_type for cell in code for output in cell.outputs}
        assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]
        assert kinds >= {"stream", "display_data"}
        assert notebook.metadata.outputs_of == run_notebooks.digest(notebook)
        assert path.stat().st_size < 150_000
