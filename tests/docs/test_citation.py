"""The citation is of this version."""

import re

import pytest

import optax_largebatch as lb
from tests.size import ROOT

TEXT = (ROOT / "CITATION.cff").read_text()
PAGES = sorted((ROOT / "docs" / "algorithms").glob("*.md"))


def test_names_the_last_release_of_the_changelog():
    changes = (ROOT / "CHANGELOG.md").read_text()
    version, date = re.search(r"^## (\d\S+) \((20\d\d-\d\d-\d\d)\)$", changes, re.M).groups()
    assert re.findall(r"^version: (.+)$", TEXT, re.MULTILINE) == [version] == [lb.__version__]
    assert re.findall(r"^date-released: (.+)$", TEXT, re.MULTILINE) == [date]


def test_the_changelog_names_what_there_is():
    """Or, in older versions, what the page about moving from 0.1.0 names."""
    before = re.findall(r"`(\w+)`", (ROOT / "docs" / "from_0_1_0.md").read_text())
    known = {*lb.__all__, *dir(lb), *lb.recipes.__all__, *before}
    named = re.findall(r"`([a-z_]+)`", (ROOT / "CHANGELOG.md").read_text())
    elsewhere = {"update", "explain", "recipes", "scale", "plan"}
    assert set(named) - elsewhere <= known


def test_the_bibtex_of_the_library_is_of_this_version():
    (entry,) = re.findall(
        r"^```bibtex\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.S
    )
    assert f"version = {{{lb.__version__}}}" in entry


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_algorithm_can_be_cited(page):
    text, *_ = page.read_text().partition("## Citing")
    (entry,) = re.findall(r"^```bibtex\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert entry.count("{") == entry.count("}")
    papers = re.findall(r"arxiv.org/abs/(\d{4}\.\d{5})", text)
    assert f"https://arxiv.org/abs/{papers[-1]}" in entry


def test_has_the_paper_of_every_docstring_that_names_one():
    optimizers = (lb.lamb, lb.lans, lb.lars, lb.scaled_adam)
    for optimizer in optimizers:
        for paper in re.findall(r"arXiv (\d{4}\.\d{5})", optimizer.__doc__):
            assert f"https://arxiv.org/abs/{paper}" in TEXT
