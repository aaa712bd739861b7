"""The page of evidence says what the committed trials say."""

from pathlib import Path
import runpy

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "evidence.md").read_text()


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(DOCS / "write_evidence.py"))


def test_is_what_the_script_writes(script):
    assert script["written"](PAGE) == PAGE


def test_the_script_puts_right_what_is_wrong(script):
    wrong = PAGE.replace("| `adamw` | ", "| `adamw` | 7")
    assert wrong != PAGE
    assert script["written"](wrong) == PAGE


def test_refuses_a_page_without_the_places(script):
    with pytest.raises(ValueError, match="page must have one '<!-- digits"):
        script["written"]("# Evidence\n")
