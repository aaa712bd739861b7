"""The pages on recipes name all that the package has."""

import csv
from pathlib import Path

import optax_largebatch as lb
from optax_largebatch.plans.law import LAWS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_names_every_recipe_ramp_and_rule():
    names = {
        "recipes.md": lb.recipes.names(),
        "guides/scaling_rules.md": LAWS,
    }
    for path, names_of_page in names.items():
        assert not [
            name for name in names_of_page if f"| `{name}` |" not in (DOCS / path).read_text()
        ]


def test_what_a_recipe_lost_on_other_data():
    path = ROOT / "benchmarks" / "results" / "cpu-2-cores" / "self_supervised_digits.csv"
    accuracy = {
        (row["line"], row["batch_size"]): 100 * float(row["accuracy"])
        for row in csv.DictReader(path.read_text().splitlines())
    }
    less = [
        accuracy["AdamW, rate tuned", batch] - own
        for (line, batch), own in accuracy.items()
        if line == "LARS by the recipe"
    ]
    said = f"{min(less):.1f} to {max(less):.1f} points of accuracy less"
    assert said in (DOCS / "recipes.md").read_text()
