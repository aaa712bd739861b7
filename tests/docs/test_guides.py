"""The code of each guide is a program, and prints what the guide says."""

import re

import jax
import pytest

from tests.conftest import slow_but
from tests.processes import printed_by
from tests.size import ROOT

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 8), reason="specs print otherwise")

GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
PAGES = [
    *GUIDES,
    ROOT / "docs" / "coming_from.md",
    ROOT / "docs" / "coming_from" / "optax.md",
    ROOT / "docs" / "stability.md",
    ROOT / "README.md",
]
BLOCK = re.compile(
    r"^```(?:python|diff)\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE
)
END = "(end of block)"


def after(code, sign="+"):
    """The program that a diff leads to, or with `-` the one that it starts from."""
    lines = code.splitlines(keepends=True)
    if not any(line.startswith("+") for line in lines):
        return code
    return "".join(line[1:] for line in lines if line.startswith((" ", sign)))


@pytest.mark.slow
def test_the_program_before_the_diff_runs_too():
    blocks = BLOCK.findall((ROOT / "README.md").read_text())
    before = "".join(after(code, "-") for code, _ in blocks)
    assert "optax.adamw" in before
    assert "lb." not in before
    assert printed_by(before) == ""


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text()
    (diff,) = re.findall(r"^```diff\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(text.split()) <= 720
    assert len(diff.splitlines()) <= 15


@pytest.mark.parametrize("guide", slow_but(PAGES[-1:], PAGES), ids=lambda page: page.stem)
def test_prints_what_it_says(guide):
    blocks = [(after(code), text) for code, text in BLOCK.findall(guide.read_text())]
    program = "".join(f"{code}\nprint({END!r})\n" for code, _ in blocks)
    printed = printed_by(program).split(f"{END}\n")[:-1]
    assert printed == [text for _, text in blocks]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_quotes_an_example(guide):
    """What is not run is quoted from an example, to the letter."""
    examples = "".join(path.read_text() for path in (ROOT / "examples").glob("*.py"))
    for quoted in re.findall(r"^```py\n(.*?)^```", guide.read_text(), re.DOTALL | re.MULTILINE):
        assert quoted in examples


def test_every_output_belongs_to_a_block():
    for guide in PAGES:
        text = guide.read_text()
        belonging = [output for _, output in BLOCK.findall(text) if output]
        assert len(belonging) == text.count("```text\n"), guide.name
