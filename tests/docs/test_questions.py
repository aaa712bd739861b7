"""Questions of three readers, and where the site answers each: two clicks from the front page."""

from pathlib import Path
import re

import pytest

DOCS = Path(__file__).parents[2] / "docs"
LINK = re.compile(r"\]\(([\w./]+?\.(?:md|ipynb))(?:#[\w-]*)?\)")
MOST_WORDS = 2500

TONIGHT, ADOPTING = "guides/from_adamw_to_16k.md", "guides/adopting.md"
CHOOSING = "guides/choosing_a_batch_size.md"
QUESTIONS = {
    # An engineer with AdamW at 512, who wants 16k tonight.
    "What rate do I start with?": (TONIGHT, "The search that remains"),
    "What becomes of my weight decay?": ("guides/scaling_rules.md", "The law"),
    "How many steps will it take?": (TONIGHT, "Three statements"),
    "What do I look at first?": (TONIGHT, "The first 200 steps"),
    "When do I stay with AdamW?": (TONIGHT, "When to stop, and stay with AdamW"),
    "Do I begin with the large batch?": (CHOOSING, "The batch over the run"),
    "Has somebody trained my model at this batch?": ("recipes.md", "Language"),
    "Who moves what?": ("algorithms/muonh.md", "Who moves what"),
    "Which batch is my rate for?": (TONIGHT, "Three statements"),
    "My qkv is fused, what now?": ("algorithms/muon.md", "Several matrices in one parameter"),
    "What does it have to know of my network?": (
        "guides/your_model.md",
        "What is known, and what is asked",
    ),
    "What does a whole program look like?": ("guides/your_program.md", "What the lines are for"),
    # The owner of a code base.
    "What do I depend on?": (ADOPTING, "What you depend on"),
    "What happens to my checkpoints?": (ADOPTING, "What you promise your checkpoints"),
    "How do I leave again?": (ADOPTING, "Leaving again"),
    "Where does MaxText build it?": (ADOPTING, "Where your code base builds its optimizer"),
    "How do I log the rate?": (ADOPTING, "Where your code base builds its optimizer"),
    "What does it cost on an H100?": ("measured.md", "A step on an H100"),
    "Did it run on a GPU?": ("stability.md", "Status"),
    "Which JAX does it need?": ("stability.md", "Which versions of JAX"),
    "What if JAX changes?": ("stability.md", "What we use of JAX's insides"),
    # A researcher with a paper, and a network on many devices.
    "Which paper's version is this?": ("dialects.md", "LAMB"),
    "Does it work with my scanned model?": ("guides/stacked_layers.md", "What goes wrong"),
    "And sharded with FSDP?": ("guides/jit_on_a_mesh.md", "Parameters split over devices (FSDP)"),
    "Is it better than Adam?": ("evidence.md", "Does the gap grow with the batch?"),
    "How far is the law from a search?": ("evidence.md", "What does following the law cost?"),
    "What do other libraries have?": ("libraries.md", "What each is best at"),
    "How do I write my own?": ("guides/your_own_optimizer.md", "How to test it"),
}
LONG = {"dialects.md"}  # a table; pages of details and of the API are long, too


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
        if page.relative_to(DOCS).parts[0] not in ("_build", "details", "api")
        and page.name not in LONG
    ],
    ids=lambda page: page.stem,
)
def test_no_page_is_long(page):
    assert len(page.read_text().split()) <= MOST_WORDS
