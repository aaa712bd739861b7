"""Twelve questions of readers, and where the site answers each: two clicks from the front page."""

from pathlib import Path
import re

import pytest

DOCS = Path(__file__).parents[2] / "docs"
LINK = re.compile(r"\]\(([\w./]+?\.(?:md|ipynb))(?:#[\w-]*)?\)")

QUESTIONS = {
    # An engineer with AdamW at 512, who wants 16k tonight.
    "What rate do I start with?": ("guides/from_adamw_to_16k.md", "The rates to start with"),
    "How many steps will it take?": ("guides/from_adamw_to_16k.md", "How many steps"),
    "What do I look at first?": ("guides/from_adamw_to_16k.md", "The first 200 steps"),
    "When do I stay with AdamW?": (
        "guides/from_adamw_to_16k.md",
        "When to stop, and stay with AdamW",
    ),
    # The owner of a code base.
    "What do I depend on?": ("guides/adopting.md", "What you depend on"),
    "What happens to my checkpoints?": ("guides/adopting.md", "What you promise your checkpoints"),
    "How do I leave again?": ("guides/adopting.md", "Leaving again"),
    "What does it cost on an H100?": ("measured.md", "GPUs and TPUs, as compiled"),
    # A researcher with a paper, and a network on many devices.
    "Which paper's version is this?": ("dialects.md", "LAMB"),
    "Does it work with my scanned model?": ("guides/stacked_layers.md", "What goes wrong"),
    "And sharded with FSDP?": (
        "guides/jit_on_a_mesh.md",
        "Parameters split over devices (FSDP)",
    ),
    "Is it better than Adam?": ("evidence.md", "How it is measured"),
}


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


@pytest.mark.parametrize(
    ("words", "page"),
    {
        "gradient accumulation": "guides/macro_batches_and_precision.md",
        "MultiSteps": "guides/macro_batches_and_precision.md",
        "ZeRO": "guides/jit_on_a_mesh.md",
        "FSDP": "guides/jit_on_a_mesh.md",
    }.items(),
)
def test_a_search_finds_it_in_a_heading(words, page):
    headings = re.findall(r"^#+ .+$", (DOCS / page).read_text(), re.MULTILINE)
    assert any(words.lower() in heading.lower() for heading in headings)


def test_the_table_of_algorithms_has_every_page():
    assert links("algorithms.md") >= {
        f"algorithms/{page.name}" for page in (DOCS / "algorithms").glob("*.md")
    }


def test_the_table_of_guides_has_every_guide():
    guides = {f"guides/{page.name}" for page in (DOCS / "guides").glob("*.md")}
    assert links("guides.md") >= guides
