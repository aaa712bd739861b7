"""The pages on recipes say what the package's data and programs say."""

from pathlib import Path
import runpy

import pytest

import optax_largebatch as lb
from optax_largebatch.recipes.scaling_rules import RULES

DOCS = Path(__file__).parents[2] / "docs"
SCRIPT = runpy.run_path(str(DOCS / "write_recipes.py"))
written, PAGES = SCRIPT["written"], SCRIPT["PAGES"]


def text(path):
    return (DOCS / path).read_text()


@pytest.mark.parametrize("path", PAGES)
def test_is_what_the_script_writes(path):
    assert written(text(path), PAGES[path]) == text(path)


@pytest.mark.parametrize(
    ("path", "right", "wrong"),
    [
        ("recipes.md", "0.00675", "0.01"),
        ("guides/choosing_a_batch_size.md", "12724", "20000"),
        ("guides/scaling_rules.md", "0.00288", "0.003"),
    ],
)
def test_the_script_puts_right_what_is_wrong(path, right, wrong):
    page = text(path).replace(right, wrong)
    assert page != text(path)
    assert written(page, PAGES[path]) == text(path)


@pytest.mark.parametrize("path", PAGES)
def test_refuses_a_page_without_the_places(path):
    with pytest.raises(ValueError, match="page must have one '<!-- "):
        written("# Recipes\n", PAGES[path])


def test_names_every_recipe_ramp_and_rule():
    names = {
        "recipes.md": lb.recipes.names(),
        "guides/scaling_rules.md": RULES,
    }
    for path, names_of_page in names.items():
        assert not [name for name in names_of_page if f"| `{name}` |" not in text(path)]
