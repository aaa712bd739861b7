"""The page of recipes says what the package's data and programs say."""

from pathlib import Path
import runpy

import pytest

import optax_largebatch as lb
from optax_largebatch.recipes.scaling_rules import RULES

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "recipes.md").read_text()


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(DOCS / "write_recipes.py"))


def test_is_what_the_script_writes(script):
    assert script["written"](PAGE) == PAGE


def test_the_script_puts_right_what_is_wrong(script):
    wrong = PAGE.replace("12724", "20000").replace("0.00288293", "0.003")
    assert wrong != PAGE
    assert script["written"](wrong) == PAGE


def test_refuses_a_page_without_the_places(script):
    with pytest.raises(ValueError, match="page must have one '<!-- recipes"):
        script["written"]("# Recipes\n")


def test_names_every_recipe_and_rule():
    for name in (*lb.recipes.names(), *RULES):
        assert f"| `{name}` |" in PAGE
