"""One address of the repository, that of pyproject.toml, wherever it is written."""

import re
import tomllib

import pytest

import optax_largebatch as lb
from tests.size import ROOT

ADDRESS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
OURS = re.compile(r"github\.com/(optax-largebatch/[\w-]+)|colab[\w./]+?/github/([\w-]+/[\w-]+)")
INSTALLS = [ROOT / "README.md", *sorted((ROOT / "notebooks").glob("*.ipynb"))]
WRITTEN = [*INSTALLS, ROOT / "CITATION.cff", ROOT / "CONTRIBUTING.md"]


@pytest.mark.parametrize("file", WRITTEN, ids=lambda file: file.name)
def test_is_the_one_of_the_project(file):
    found = {one or other for one, other in OURS.findall(file.read_text())}
    assert found == {ADDRESS.removeprefix("https://github.com/")}


@pytest.mark.parametrize("file", INSTALLS, ids=lambda file: file.name)
def test_is_what_pip_installs(file):
    assert f"git+{ADDRESS}" in file.read_text()


def test_the_readme_names_the_version():
    assert f"ersion {lb.__version__}" in (ROOT / "README.md").read_text()
