"""The pages say what the committed trials of the main protocol say."""

import itertools
from pathlib import Path
import runpy

import numpy as np
import pytest

from benchmarks.harness.results import read
from benchmarks.tuned.intervals import difference
from benchmarks.tuned.results import curves
from benchmarks.tuned.sweep import Row, table_of
from benchmarks.tuned.workloads import BERT, CAUSAL, WORKLOADS

ROOT = Path(__file__).parents[2]
SIZES = ("32", "128", "512", "2048")


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "docs" / "write_evidence.py"))


@pytest.fixture(scope="module")
def results(script):
    return script["tuned"]("bert")[1]


@pytest.fixture(scope="module")
def of_causal(script):
    return script["tuned"]("causal")[1]


def on_one_line(page):
    return " ".join((ROOT / "docs" / page).read_text().split())


@pytest.fixture(scope="module")
def page():
    return on_one_line("evidence.md")


def around_512(script, workload):
    """The losses at batch 512 around the chosen rates and decays."""
    rows = read(table_of(workload, script["RESULTS"]), Row)
    return {role: curves(workload, rows, "512", role) for role in ("rate", "decay")}


@pytest.fixture(scope="module")
def around(script):
    return around_512(script, BERT)


def apart(results, name, other, batches):
    return difference(results[name][batches].losses, results[other][batches].losses)


def test_who_is_ahead(results, of_causal):
    """MuonH of AdamW everywhere, and of all at batch 2048; on the BERT Muon is, too."""
    for own in (results, of_causal):
        assert all(apart(own, "adamw", "muonh", size).low > 0 for size in SIZES)
        assert len(own) == 7
        assert all(apart(own, name, "muonh", "2048").low > 0 for name in own if name != "muonh")
    for name, ahead in itertools.product(("adamw", "lamb", "lans"), ("muonh", "muon")):
        assert all(apart(results, name, ahead, size).low > 0 for size in SIZES)


def test_muon_with_a_decay_is_as_good_or_better_up_to_512(results, of_causal, page):
    of_bert = [apart(results, "muon", "muonh", size) for size in SIZES[:3]]
    assert not any(own.is_clear for own in of_bert)
    others = [apart(of_causal, "muon", "muonh", size) for size in SIZES[:3]]
    assert max(own.high for own in others) < 0
    least, most = (f"{own(-x.mean for x in others):.3f}" for own in (min, max))
    assert f"{least} to {most} ahead of MuonH up to batch 512" in page
    decays = [
        own["muon"][size].settings.weight_decay for own in (results, of_causal) for size in SIZES
    ]
    assert sum(decay > 0.05 for decay in decays) == 7
    assert all(decays)


def over_the_chosen(curve, value):
    return curve.losses[value] - curve.losses[curve.chosen]


def times_the_rate(curves, factor):
    """The loss at so many times the chosen rate, over that of the chosen one, by optimizer."""
    return {
        name: over_the_chosen(own, float(f"{factor * own.chosen:.4g}"))
        for name, own in curves.items()
    }


def test_twice_the_rate(script, around, page):
    double = times_the_rate(around["rate"], 2)
    on_causal = around_512(script, CAUSAL)["rate"]
    again = times_the_rate(on_causal, 2)
    three = [double[name] for name in ("adamw", "lamb", "lans")]
    assert (round(min(three), 1), round(max(three), 1)) == (0.5, 0.7)
    half = times_the_rate(around["rate"], 0.5)["muonh"]
    assert double["muonh"] < 0.02
    assert f"less than 0.02 at twice its chosen rate and {half:.2f} at half of it" in page
    assert max(again[name] for name in script["SHORT"]) < 0.09
    four = {name: f"{loss:.2f}" for name, loss in times_the_rate(on_causal, 4).items()}
    assert four["lamb"] == four["lans"]
    said = "MuonH {muonh}, Muon {muon}, AdamW {adamw}, LAMB and LANS {lans}".format(**four)
    assert f"Four times the rate costs {said}" in page


def test_the_decay(around, results, page):
    decays = around["decay"]
    without = {name: over_the_chosen(own, 0.0) for name, own in decays.items()}
    assert f"Muon loses {without['muon']:.2f} and AdamW {without['adamw']:.2f}, LANS" in page
    assert abs(without["lans"]) < 0.03
    muon, adamw = (-over_the_chosen(decays[name], at) for name, at in (("muon", 0.3), ("adamw", 1)))
    assert f"Muon is {muon:.2f} better at a decay of 0.3" in page
    assert f"and AdamW {adamw:.2f} better at 1.0" in page
    gap = apart(results, "adamw", "muonh", "512").mean
    assert 4 * adamw < gap


def test_two_more_optimizers(results, of_causal, page):
    cells = [apart(own, "nadamw", "adamw", size) for own in (results, of_causal) for size in SIZES]
    assert [own.is_clear for own in cells] == [False] * 4 + [True] + [False] * 3
    assert f"in one of eight cells, by {-cells[4].mean:.3f} at batch 32" in page
    for own in (results, of_causal):
        assert not any(apart(own, "adamh", "adamw", size).high < 0 for size in SIZES)
        behind = [apart(own, "adamh", "muonh", size) for size in SIZES]
        assert min(own.low for own in behind) > 0
    behind = [apart(results, "adamh", "muonh", size) for size in SIZES]
    least, most = (f"{own([x.mean for x in behind]):.2f}" for own in (min, max))
    assert f"{least} to {most} behind MuonH" in page


def test_a_run_that_was_made_again(script, page):
    """Plans of the same batches, in two tables."""

    def losses(workload, batches):
        rows = read(table_of(WORKLOADS[workload], script["RESULTS"]), Row)
        own = (row for row in rows if (row.optimizer, row.batches) == ("muonh", batches))
        return {(*row[4:8],): row.test_loss for row in own}

    def both(network):
        first, second = losses(network, "512"), losses(f"{network}_ramp", "four_times")
        return {key: (first[key], second[key]) for key in first.keys() & second.keys()}

    on_causal, on_bert = both("causal"), both("bert")
    assert len(on_causal) == 24 == len(losses("causal_ramp", "four_times"))
    assert all(first == second for first, second in on_causal.values())
    differ = [abs(first - second) for first, second in on_bert.values()]
    said = f"their {len(differ)} common runs differ by {np.median(differ):.3f} in the median"
    assert f"{said} and by up to {max(differ):.2f}" in page
    cells = ("bert", "512"), ("bert_ramp", "four_times")
    rates = (script["tuned"](name)[1]["muonh"][own].settings.learning_rate for name, own in cells)
    assert "a rate of {:.2g} in the first and of {:.2g} in the second.".format(*rates) in page


def test_a_batch_that_grows(script, page):
    workload, results = script["tuned"]("bert_ramp")
    again = {
        plan: apart_of(script["tuned"]("causal_ramp")[1]["muonh"], plan)
        for plan in ("two_stages", "four_times", "seesaw")
    }
    steps = {name: plan.total_steps for name, plan in workload.plans.items()}
    assert {plan.examples for plan in workload.plans.values()} == {65_536}
    muonh, adamw = (
        {plan: apart_of(results[name], plan) for plan in steps if plan != "constant"}
        for name in ("muonh", "adamw")
    )
    assert all(own.low > 0 for own in (*muonh.values(), adamw["two_stages"], adamw["four_times"]))
    assert not adamw["seesaw"].is_clear
    assert min(own.low for own in again.values()) > 0
    for said in (
        f"{steps['two_stages']} steps in place of {steps['constant']}",
        f"{muonh['two_stages'].mean:.3f} above batch 128 throughout",
        f"Batch 512 throughout ends {muonh['four_times'].mean:.3f} above it.",
        f"With AdamW the two stages lose {adamw['two_stages'].mean:.3f}.",
        f"saves {1 - steps['seesaw'] / steps['constant']:.0%} of the steps",
        f"are {again['two_stages'].mean:.3f} and {again['four_times'].mean:.3f}.",
        f"{muonh['seesaw'].mean:.3f} and, on the second network, {again['seesaw'].mean:.3f}",
    ):
        assert said in page


def apart_of(own, plan):
    return difference(own[plan].losses, own["constant"].losses)


def test_the_gap_grows(script, results, of_causal):
    for name in ("adamw", "lamb", "lans"):
        means = [apart(results, name, "muonh", size).mean for size in SIZES]
        assert means == sorted(means)
        assert means[-1] > 2 * means[0]
    means = [apart(of_causal, "adamw", "muonh", size).mean for size in SIZES]
    assert means == sorted(means)
    for name in ("lamb", "lans"):
        clear = [apart(of_causal, name, "muonh", size).is_clear for size in SIZES]
        assert clear == [False, False, True, True]
    for network in ("bert", "causal"):
        others = (name for name in script["SHORT"] if name != "muonh")
        assert all(script["growth"](network, name).low > 0 for name in others)
