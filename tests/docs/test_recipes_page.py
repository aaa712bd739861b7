"""The pages on recipes name all that the package has."""

from pathlib import Path

import optax_largebatch as lb
from optax_largebatch.plans.law import LAWS

DOCS = Path(__file__).parents[2] / "docs"


def test_names_every_recipe_ramp_and_rule():
    names = {
        "recipes.md": lb.recipes.names(),
        "guides/scaling_rules.md": LAWS,
    }
    for path, names_of_page in names.items():
        assert not [
            name for name in names_of_page if f"| `{name}` |" not in (DOCS / path).read_text()
        ]
