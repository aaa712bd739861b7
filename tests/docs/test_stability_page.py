"""The page of versions says what the tests run with, and what the engine uses of JAX."""

import re
import tomllib

from tests.size import ROOT

PAGE = (ROOT / "docs" / "stability.md").read_text()
VERSIONS = ROOT / "tests" / "versions"
ROWS = {
    cells[0]: cells[1:]
    for cells in (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in re.findall(r"^\|.*\|$", PAGE.partition("## Which versions")[2], re.M)
    )
}


def pinned(name):
    text = (VERSIONS / f"{name}.txt").read_text()
    return dict(re.findall(r"^(\w+)==(\S+)$", text, re.MULTILINE))


def test_the_lowest_versions_are_those_of_the_tests_and_of_the_package():
    python, jax, _, optax, *_ = ROWS["lowest"]
    assert [jax, optax] == [pinned("lowest")["jax"], pinned("lowest")["optax"]]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == [f"jax>={jax}", f"optax>={optax}"]
    assert project["requires-python"] == f">={python}"


def test_the_version_between_is_that_of_the_tests():
    assert ROWS["between"][1] == pinned("jax-0.7")["jax"]


def test_names_every_import_that_jax_does_not_promise():
    """As the engine's README, which a test of the engine compares with the imports."""
    readme = (ROOT / "optax_largebatch" / "engine" / "README.md").read_text()
    table = readme.partition("## What is used of JAX's insides")[2].partition("These attributes")[0]
    names = re.findall(r"^\| `jax\.[\w.]+\.(\w+)` ", table, re.MULTILINE)
    assert len(names) > 10
    section = PAGE.partition("## What we use of JAX's insides")[2].partition("\n## ")[0]
    assert [name for name in names if name not in section] == []
