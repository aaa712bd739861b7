"""The rates of the guide from AdamW at 512 to 16k have the reasons that it gives."""

from pathlib import Path
import statistics

import optax_largebatch as lb
from optax_largebatch.recipes.published import published, rows

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "from_adamw_to_16k.md").read_text()
GUIDE = " ".join(GUIDE.split())


def large_lamb_recipes():
    """For each published LAMB recipe the median of its rates at a batch of 2048 or more."""
    for name, entry in published().items():
        rates = [
            row["learning_rate"]
            for row in rows(entry)
            if "learning_rate" in row and row.get("batch_size", 0) >= 2048
        ]
        if "/lamb/" in name and rates:
            yield statistics.median(rates)


def test_lamb_starts_at_the_median_of_the_published():
    rates = list(large_lamb_recipes())
    assert f"{statistics.median(rates):.0e}".replace("e-0", "e-") == "4e-3"
    assert f"4e-3 is the median of the {len(rates)} published LAMB recipes" in GUIDE
    of_bert = [lb.recipes.get(f"bert-large/lamb/{own}", 16384) for own in ("mlperf", "paper")]
    assert [f"{1000 * recipe.learning_rate:.1f}" for recipe in of_bert] == ["3.3", "3.5"]


def test_lans_starts_where_its_paper_points():
    for part, batch_size, rate in (("paper-phase2", 33792, 3.5), ("paper-phase1", 98304, 2.8)):
        recipe = lb.recipes.get(f"bert-large/lans/{part}", batch_size)
        assert round(1000 * recipe.learning_rate * (16384 / batch_size) ** 0.5, 1) == rate


def test_the_fractions_of_the_warm_up_are_those_of_the_papers():
    for name, batch_size, percent in (
        ("lamb/paper", 16384, 10),
        ("lamb/paper", 512, 0.3),
        ("lans/paper-phase1", 98304, 43),
    ):
        recipe = lb.recipes.get(f"bert-large/{name}", batch_size)
        assert round(100 * recipe.warmup_steps / recipe.total_steps, percent < 1) == percent
