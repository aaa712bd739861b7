"""Questions of three readers, and where the site answers each: two clicks from the front page."""

import json
from pathlib import Path
import re

import pytest

from tests.size import ROOT

DOCS = ROOT / "docs"
LINK = re.compile(r"\]\(([\w./]+?\.(?:md|ipynb))(?:#[\w-]*)?\)")
MOST_WORDS = 1500

QUESTIONS = json.loads(Path(__file__).with_name("questions.json").read_text())
# Looked up, not read, as is the API.
REFERENCE = {"dialects.md", "errors.md", "recipes.md"}


def links(page):
    """The pages that a page links to, in its body."""
    text = (DOCS / page).read_text().partition("```{toctree}")[0]
    paths = ((DOCS / page).parent / target for target in LINK.findall(text))
    return {path.resolve().relative_to(DOCS.resolve()).as_posix() for path in paths}


@pytest.mark.parametrize("question", QUESTIONS)
def test_is_answered_two_clicks_from_the_front_page(question):
    page, section = QUESTIONS[question]
    assert re.search(rf"^##+ {re.escape(section)}$", (DOCS / page).read_text(), re.MULTILINE)
    first = links("index.md")
    markdown = {target for target in first if target.endswith(".md")}
    assert page in first | set().union(*(links(target) for target in markdown))


def test_the_table_of_algorithms_has_every_page():
    assert links("algorithms.md") >= {
        f"algorithms/{page.name}" for page in (DOCS / "algorithms").glob("*.md")
    }


def test_the_front_page_has_every_guide():
    guides = {f"guides/{page.name}" for page in (DOCS / "guides").glob("*.md")}
    assert links("index.md") >= guides


@pytest.mark.parametrize(
    "page",
    [
        page
        for page in sorted(DOCS.rglob("*.md"))
        if page.relative_to(DOCS).parts[0] not in ("_build", "api") and page.name not in REFERENCE
    ],
    ids=lambda page: page.stem,
)
def test_no_page_is_long(page):
    assert len(page.read_text().split()) <= MOST_WORDS
