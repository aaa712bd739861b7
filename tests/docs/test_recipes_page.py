"""The pages on recipes name all that the package has."""

from docs.write_measured import DOCS, read
import optax_largebatch as lb
from optax_largebatch.plans.law import LAWS


def test_names_every_recipe_ramp_and_rule():
    for page, names in (("recipes.md", lb.recipes.names()), ("guides/scaling_rules.md", LAWS)):
        text = (DOCS / page).read_text()
        assert not [name for name in names if f"| `{name}` |" not in text]


def test_what_a_recipe_lost_on_other_data():
    accuracy = {
        (row["line"], row["batch_size"]): 100 * float(row["accuracy"])
        for row in read("cpu-2-cores/self_supervised_digits.csv")
    }
    less = [
        accuracy["AdamW, rate tuned", batch] - own
        for (line, batch), own in accuracy.items()
        if line == "LARS by the recipe"
    ]
    said = f"{min(less):.1f} to {max(less):.1f} points of accuracy less"
    assert said in (DOCS / "recipes.md").read_text()
