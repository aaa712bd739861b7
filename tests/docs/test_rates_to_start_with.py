"""The rates to start with have the reasons that the pages give."""

import statistics

from docs.write_evidence import OPTIMIZERS, tuned
import optax_largebatch as lb
from optax_largebatch.recipes.catalogue import published, rows
from tests.size import ROOT

DOCS = ROOT / "docs"
LAMB, GUIDE, MUONH = (
    " ".join((DOCS / page).read_text().split())
    for page in ("algorithms/lamb.md", "guides/from_adamw_to_16k.md", "algorithms/muonh.md")
)


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
    assert round(statistics.median(rates), 3) == 0.004
    assert f"0.004 is the median of the {len(rates)} published LAMB recipes" in LAMB
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


def test_contrastive_pretraining_and_fine_tuning_take_less():
    rates = [
        row["learning_rate"]
        for name, entry in published().items()
        if "/lamb/" in name and ("clip" in name or "fine-tune" in name)
        for row in rows(entry)
    ]
    assert f"take less ({min(rates):.4f} to {max(rates):.4f} in published runs)" in LAMB


def test_the_rates_of_a_small_network_grow_less_than_the_square_root_rule_asks_for():
    _, results = tuned("bert")
    growths = []
    for name in OPTIMIZERS:
        small, large = (results[name][size].settings.learning_rate for size in ("32", "2048"))
        assert min(small, large) > 0.004
        growths.append(large / small)
    assert (round(min(growths)), round(max(growths))) == (4, 6)
    assert "asks for 8 times the rate. The chosen rates grew by 4 to 6 times" in GUIDE


def test_muonh_starts_where_published_runs_point():
    short, long = map(lb.recipes.get, ("gpt2-124m/muonh/track-3", "marin-535b/muonh/marin"))
    tokens = [own.batch_size * own.sequence_length for own in (short, long)]
    assert f"{short.learning_rate} in {short.total_steps} steps at {tokens[0] / 1e3:.0f}k" in MUONH
    said = f"{long.learning_rate:.4f} in {long.total_steps:,} steps at {tokens[1] / 1e6:.0f}M"
    assert said in MUONH
