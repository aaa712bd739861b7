"""The pages say what the committed trials of the main protocol say."""

from pathlib import Path
import runpy

import pytest

from benchmarks.harness.table import read
from benchmarks.tuned.intervals import difference
from benchmarks.tuned.results import curves
from benchmarks.tuned.sweep import Row, table_of
from benchmarks.tuned.workloads import BERT

ROOT = Path(__file__).parents[2]
SIZES = ("32", "128", "512", "2048")


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "docs" / "write_evidence.py"))


@pytest.fixture(scope="module")
def results(script):
    return script["tuned"]("bert")[1]


@pytest.fixture(scope="module")
def page():
    """The text, on one line."""
    return " ".join((ROOT / "docs" / "evidence.md").read_text().split())


@pytest.fixture(scope="module")
def around(script):
    """The losses at batch 512 around the chosen rates and decays, over those of the chosen."""
    rows = read(table_of(BERT, script["MAIN_RESULTS"]), Row)
    return {role: curves(BERT, rows, "512", role) for role in ("rate", "decay")}


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "docs/evidence.md",
        "docs/details/tuned.md",
        "docs/details/steps_to_a_target.md",
        "docs/guides/from_adamw_to_16k.md",
    ],
)
class TestPage:
    def test_is_what_the_script_writes(self, script, name):
        page = (ROOT / name).read_text()
        assert script["written"](ROOT / name, page) == page

    def test_the_script_puts_right_what_is_wrong(self, script, name):
        page = (ROOT / name).read_text()
        wrong = page.replace("| `adamw` | ", "| `adamw` | 7")
        assert wrong != page
        assert script["written"](ROOT / name, wrong) == page

    def test_refuses_a_page_without_the_places(self, script, name):
        with pytest.raises(ValueError, match="must have one '<!-- "):
            script["written"](ROOT / name, "# Evidence\n")


# The sentences of the first screen.


def apart(results, name, other, batches):
    return difference(results[name][batches].losses, results[other][batches].losses)


def test_muonh_and_muon_are_ahead_at_every_batch_size(results, page):
    """Of Muon README and front page say so."""
    for name in ("adamw", "lamb", "lans"):
        for ahead in ("muonh", "muon"):
            assert all(apart(results, name, ahead, size).low > 0 for size in SIZES)
    said = "a lower test loss than AdamW, LAMB and LANS at every batch size from 32 to 2048"
    assert said in page


def test_muon_with_a_decay_is_as_good_up_to_512(results, page):
    clear = [apart(results, "muon", "muonh", size).is_clear for size in SIZES]
    assert clear == [False, False, False, True]
    assert apart(results, "muon", "muonh", "2048").mean > 0
    assert all(results["muon"][size].settings.weight_decay for size in SIZES)
    assert "Muon with a tuned weight decay is as good up to batch 512." in page


def over_the_chosen(curve, value):
    return curve.losses[value] - curve.losses[curve.chosen]


def test_twice_the_rate(around, page):
    rates = around["rate"]
    double = {
        name: over_the_chosen(own, float(f"{2 * own.chosen:.4g}")) for name, own in rates.items()
    }
    assert 0 < double["muonh"] < 0.02
    three = [double[name] for name in ("adamw", "lamb", "lans")]
    assert (round(min(three), 1), round(max(three), 1)) == (0.5, 0.7)
    own = rates["muonh"]
    half = over_the_chosen(own, float(f"{own.chosen / 2:.4g}"))
    assert f"less than 0.02 at twice its chosen rate and {half:.2f} at half of it" in page
    assert "AdamW, LAMB and LANS lose 0.5 to 0.7 at twice theirs" in page
    said = "MuonH by less than 0.02, and that of AdamW, LAMB and LANS by 0.5 to 0.7"
    assert said in page


def test_the_decay(around, results, page):
    decays = around["decay"]
    without = {name: over_the_chosen(own, 0.0) for name, own in decays.items()}
    assert f"Muon loses {without['muon']:.2f} and AdamW {without['adamw']:.2f}, LANS" in page
    assert abs(without["lans"]) < 0.03
    for name in ("adamw", "muon"):
        assert all(results[name][size].settings.weight_decay > 0.05 for size in SIZES)
    assert "the chosen decays are above 0.05" in page
    muon, adamw = (-over_the_chosen(decays[name], at) for name, at in (("muon", 0.3), ("adamw", 1)))
    assert f"Muon is {muon:.2f} better at a decay of 0.3" in page
    assert f"and AdamW {adamw:.2f} better at 1.0" in page
    gap = apart(results, "adamw", "muonh", "512").mean
    assert 4 * adamw < gap


def test_two_more_optimizers(results, page):
    assert not any(apart(results, "nadamw", "adamw", size).is_clear for size in SIZES)
    assert "NAdamW** is not clearly better or worse than AdamW at any batch size" in page
    assert not any(apart(results, "adamh", "adamw", size).high < 0 for size in SIZES)
    behind = [apart(results, "adamh", "muonh", size) for size in SIZES]
    assert min(own.low for own in behind) > 0
    least, most = (f"{own([x.mean for x in behind]):.2f}" for own in (min, max))
    assert f"It is {least} to {most} behind MuonH and nowhere ahead of AdamW." in page


def test_a_second_network(script, page):
    _, results = script["tuned"]("causal")
    adamw, muon = (apart(results, name, "muonh", "2048") for name in ("adamw", "muon"))
    small = apart(results, "adamw", "muonh", "32")
    assert min(adamw.low, muon.low, small.low) > 0
    said = f"MuonH ends {adamw.mean:.3f} below AdamW and {muon.mean:.3f} below Muon"
    assert f"the same order at batch 2048: {said}" in page
    leads = (script["lead"](results, "adamw", size) for size in ("2048", "32"))
    grown = difference(*leads)
    assert grown.low > 0
    said = f"grows, by {grown.mean:.3f} ({grown.low:.3f} to {grown.high:.3f})."
    assert f"At batch 32 it ends {small.mean:.3f} below AdamW, so here too the lead {said}" in page


def test_a_batch_that_grows(script, page):
    workload, results = script["tuned"]("bert_ramp")
    steps = {name: plan.total_steps for name, plan in workload.plans.items()}
    assert {plan.examples for plan in workload.plans.values()} == {65_536}
    muonh, adamw = (
        {plan: apart_of(results[name], plan) for plan in steps if plan != "constant"}
        for name in ("muonh", "adamw")
    )
    assert all(own.low > 0 for own in (*muonh.values(), adamw["two_stages"], adamw["four_times"]))
    two = f"takes {steps['two_stages']} steps in place of {steps['constant']}, and ends"
    assert f"{two} {muonh['two_stages'].mean:.3f} above batch 128 throughout" in page
    assert f"Batch 512 throughout ends {muonh['four_times'].mean:.3f} above it." in page
    assert f"With AdamW the two stages lose {adamw['two_stages'].mean:.3f}; Seesaw" in page
    assert not adamw["seesaw"].is_clear
    saved = 1 - steps["seesaw"] / steps["constant"]
    assert f"loses nothing that we can measure and saves {saved:.0%} of the steps" in page


def apart_of(own, plan):
    return difference(own[plan].losses, own["constant"].losses)


def test_the_gap_grows(script, results, page):
    for name in ("adamw", "lamb", "lans"):
        means = [apart(results, name, "muonh", size).mean for size in SIZES]
        assert means == sorted(means)
        assert means[-1] > 2 * means[0]
        assert script["growth"](name).low > 0
    said = "MuonH's lead over AdamW, LAMB and LANS more than doubles from batch 32 to batch 2048"
    assert said in page
