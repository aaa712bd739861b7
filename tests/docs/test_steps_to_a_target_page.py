"""The page of steps to a target says what the committed trials say."""

from pathlib import Path
import runpy

import numpy as np
import pytest

from benchmarks.batch_size_curve.optimizers import KNOWN
from benchmarks.batch_size_curve.pieces import (
    ADDED,
    EXCHANGED,
    TUNED,
    VARIED,
    common_sizes,
    saved_between,
    sizes_of,
)
from benchmarks.batch_size_curve.provenance import record
from benchmarks.batch_size_curve.report import bootstrap_interval, fit, measured
from benchmarks.batch_size_curve.stack_ratios import read_spreads
from benchmarks.batch_size_curve.sweep import cells_of, read
from benchmarks.batch_size_curve.workloads import ON_A_CPU, PIECES, WORKLOADS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "docs" / "write_evidence.py"))


def test_the_committed_sweep_can_be_continued(script, tmp_path):
    """By the same plan, with every trial in its place."""
    path = tmp_path / "runs.json"
    path.write_text((script["RESULTS"] / "runs.json").read_text())
    record(path, list(ON_A_CPU.values()))
    rows = read(script["TRIALS"])
    held = [cells_of(workload, rows) for workload in ON_A_CPU.values()]
    counted = sum(
        len(cell.repeats) + sum(map(len, cell.search)) for own in held for cell in own.values()
    )
    assert counted == len(rows)


# The sentences of the page, in numbers.


@pytest.fixture(scope="module")
def results(script):
    rows = read(script["TRIALS"])
    return {name: measured(workload, rows) for name, workload in WORKLOADS.items()}


@pytest.fixture(scope="module")
def page():
    """The text, on one line."""
    return " ".join((ROOT / "docs" / "details" / "steps_to_a_target.md").read_text().split())


def saves(results, before, after):
    """How many steps are saved, at the batch sizes of the table that has the two."""
    for groups in (ADDED, EXCHANGED, TUNED, VARIED):
        if any((before, after) in pairs for pairs in groups.values()):
            return saved_between(results, before, after, sizes_of(results, groups))
    return saved_between(results, before, after, common_sizes(results, [before, after]))


def fewer(results, before, after):
    """As the page says it."""
    own = saves(results, before, after)
    assert own.low < own.share < own.high
    return f"{100 * own.share:.0f}% ({100 * own.low:.0f} to {100 * own.high:.0f})"


def more(results, before, after):
    """The same of what costs steps."""
    own = saves(results, before, after)
    assert own.low <= own.share <= own.high
    return f"{-100 * own.share:.0f}% ({-100 * own.high:.0f} to {-100 * own.low:.0f})"


# The five sentences, and what stands below their tables.


def test_conclusion_of_lans(results, page):
    own = results["bert_pieces"]
    assert common_sizes(own, ["adamw", "nadamw", "lans"]) == [32, 128, 512, 2048]
    assert f"{fewer(own, 'adamw', 'lans')} fewer steps than AdamW" in page
    assert f"LANS needs {fewer(own, 'nadamw', 'lans')} fewer steps than NAdamW" in page
    assert saves(own, "nadamw", "lans").clear
    half = saves(own, "nadamw", "lans").share / saves(own, "adamw", "lans").share
    assert 0.4 < half < 0.6
    assert "NAdamW closes half of that gap" in page
    tuned = "adamw_momentum_0.8"
    assert sizes_of(own, TUNED) == [32, 128, 512, 2048]
    assert "a momentum of 0.8 in place of 0.9 closes all of it" in page
    assert not saves(own, tuned, "lans").clear
    assert saves(own, tuned, "muon").clear


def test_conclusion_of_another_momentum(results, page):
    own = results["bert_pieces"]
    names = ("adamw", "lamb", "lans", "muon")
    adamw, lamb, lans, muon = (f"{name}_momentum_0.8" for name in names)
    assert f"If both have 0.8, LANS needs {fewer(own, adamw, lans)} fewer" in page
    assert f"LAMB needs as many steps as AdamW, LANS {fewer(own, adamw, lans)} fewer and" in page
    assert f"fewer and Muon {fewer(own, adamw, muon)} fewer." in page
    assert not saves(own, adamw, lamb).clear
    assert saves(own, adamw, lans).clear
    shares = [saves(own, name, f"{name}_momentum_0.8") for name in names]
    assert all(x.clear and x.share > 0 for x in shares)
    assert [x.share for x in shares] == sorted((x.share for x in shares), reverse=True)
    assert "nadamw_momentum_0.8" not in own


def test_conclusion_of_the_trust_ratio(results, page):
    bert, digits = results["bert_pieces"], results["digits"]
    added = fewer(bert, "nadamw", "lans_without_normalization")
    costs = more(digits, "nadamw", "lans_without_normalization")
    assert f"when it is added to NAdamW ({added}), and on the digits it costs {costs} more" in page
    last = fewer(bert, "lans_without_normalization", "lans")
    assert f"added last, it saves {last} of the steps" in page
    assert saves(bert, "lans_without_normalization", "lans").clear
    assert not saves(bert, "nadamw", "lans_without_normalization").clear
    for size in (16, 32, 64, 128, 256, 512, 1024):
        steps = medians(digits, size)
        assert steps["adamw"] < min(steps["lamb"], steps["lans"])


def test_conclusion_of_muon(results, page):
    own = results["bert_pieces"]
    for size in (32, 128, 512, 2048):
        steps = medians(own, size)
        assert steps["muon"] == min(steps[name] for name in PIECES) < steps["lans"]
    assert f"Muon needs {fewer(own, 'lans', 'muon')} fewer steps than LANS on the BERT" in page
    assert f"and {fewer(own, 'adamw', 'muon')} fewer than AdamW." in page
    cells = results["digits"]
    ahead = [cells["muon"][size].median < cells["lans"][size].median for size in cells["muon"]]
    assert all(ahead)
    assert not all(own.reached for own in cells["muon"].values())


def test_conclusion_of_muon_varied(results, page):
    own = results["bert_pieces"]
    said = f"If AdamW moves embedding and head, it needs {fewer(own, 'muon', 'muon_and_adamw')}"
    assert f"{said} fewer again" in page
    by_ratio, by_adamw, by_lamb = (
        [saved_between(own, "muon", name, [size]) for size in (32, 128, 512, 2048)]
        for name in ("muon_with_trust_ratio", "muon_and_adamw", "muon_and_lamb")
    )
    assert [x.clear for x in by_ratio] == [True, False, False, False]
    assert f"where it saves {str(by_ratio[0]).replace('*', '')}, and changes nothing from" in page
    assert f"at 2048 it saves {str(by_adamw[3]).replace('*', '')}" in page
    assert by_adamw == sorted(by_adamw, key=lambda own: own.share)  # Muon's page says so too
    columns = list(zip(by_adamw, by_lamb, strict=True))[1:]
    assert all(adamw.clear and adamw.share > lamb.share for adamw, lamb in columns)


def test_conclusion_of_the_stack(results, script, page):
    own = results["deep_bert"]
    saved = fewer(own, "lamb", "lamb_one_norm")
    assert saves(own, "lamb", "lamb_one_norm").clear
    assert f"saved LAMB {saved} of the steps" in page
    assert f"It cost LANS {more(own, 'lans', 'lans_one_norm')}, which is within the seeds" in page
    assert not saves(own, "lans", "lans_one_norm").clear
    rows = read_spreads(script["RESULTS"] / "stack_ratios.csv")
    most = max(rows, key=lambda own: own.times)
    assert f"differed by up to {most.times:.0f} times" in page
    guide = " ".join((ROOT / "docs" / "guides" / "stacked_layers.md").read_text().split())
    assert (most.parameter, round(most.times)) == ("query", 11)
    assert most.step == 83
    assert "differed by less than 2x, but by up to 11x around step 80" in guide
    ratios = ", ".join(f"{ratio:.2f}" for ratio in most.ratios)
    assert f"jnp.array([{ratios}])" in guide
    apart = np.mean([own.times < 2 for own in rows])
    assert apart > 0.8  # less than twice apart most of the time
    steps = medians(own, 128)
    assert f"{steps['lamb']:g} steps with a norm for each layer, and in" in guide
    assert f"and in {steps['lamb_one_norm']:g} with one norm" in guide


def test_what_the_pieces_bring(results, page):
    own = results["bert_pieces"]
    first = [fewer(own, "adamw", name) for name in ("nadamw", "lamb")]
    last = [
        fewer(own, f"lans_without_{name}", "lans")
        for name in ("nesterov", "trust_ratio", "normalization")
    ]
    assert (
        f"Added first, Nesterov's momentum saves {first[0]} and the trust ratio {first[1]}." in page
    )
    said = f"they save {last[0]} and {last[1]}, while normalised gradients keep their {last[2]}."
    assert said in page


def test_what_the_pieces_bring_on_the_digits(results, page):
    own = results["digits"]
    assert f"momentum saves AdamW {fewer(own, 'adamw', 'nadamw')} of the steps" in page
    normalised = (
        ("nadamw", "lans_without_trust_ratio"),
        ("lamb", "lans_without_nesterov"),
        ("lans_without_normalization", "lans"),
    )
    assert not any(saves(own, *pair).clear for pair in normalised)
    trust = (
        ("adamw", "lamb"),
        ("lans_without_trust_ratio", "lans"),
        ("nadamw", "lans_without_normalization"),
    )
    costs = [saves(own, *pair).share for pair in trust]
    assert all(saves(own, *pair).clear for pair in trust)
    assert costs == sorted(costs, reverse=True)
    assert f"costs {more(own, *trust[0])} to {more(own, *trust[2])} more steps wherever" in page
    assert f"0.8, saves {fewer(own, 'adamw', 'adamw_momentum_0.8')}".replace("-0 ", "0 ") in page


def test_the_bad_luck_of_adamw(results, page):
    fine, coarse = (results[name]["adamw"][128].median for name in ("bert_pieces", "bert"))
    assert f"took {fine:g} steps in the median of five new seeds" in page
    assert f"grid's took {coarse:g} in the median of three" in page


def medians(results, batch_size):
    return {name: own[batch_size].median for name, own in results.items() if batch_size in own}


def test_conclusion_of_the_digits(results):
    own = {name: results["digits"][name] for name in KNOWN}
    for batch_size in (128, 256, 512, 1024):
        steps = medians(own, batch_size)
        adams = [steps.pop("adamw"), steps.pop("eve")]
        assert len(steps) == 8
        assert min(steps.values()) >= 1.15 * max(adams)
    for batch_size in (16, 32, 64):
        low, high = bootstrap_interval(own["adamw"][batch_size].runs)
        assert low <= min(medians(own, batch_size).values()) <= high
    for batch_size in own["adamw"]:
        steps = medians(results["digits"], batch_size)
        assert steps["nadamw"] <= steps["adamw"]
        assert (steps["muon"] == min(steps.values())) == (batch_size in (16, 32, 512, 1024))
        fewest = steps["muon_momentum_0.8"] == min(steps.values())
        assert fewest == (batch_size in (32, 64, 128, 256))


def test_conclusion_of_bert(results):
    own = results["bert"]
    saved = {"lans": [], "lamb": [], "scaled_adam": [], "cain": []}
    for batch_size in (32, 128, 512, 2048):
        steps = medians(own, batch_size)
        assert len(steps) == 10
        assert steps["lans"] == min(steps.values())
        assert steps["sgd"] == max(steps.values())
        for name, own_saved in saved.items():
            own_saved.append(round(1 - steps[name] / steps["adamw"], 2))
    assert (min(saved["lans"]), max(saved["lans"])) == (0.21, 0.38)
    assert saved["lamb"][0] == 0.21
    assert max(map(abs, saved["lamb"][1:])) <= 0.11
    next_to_lans = saved["scaled_adam"] + saved["cain"]
    assert (min(next_to_lans), max(next_to_lans)) == (0.20, 0.32)
    others = {name: results["bert"][name] for name in ("adamw", "eve", "lars", "lbsgd", "sgd")}
    assert all(
        max(medians(own, size)[name] for name in ("scaled_adam", "cain"))
        < min(medians(others, size).values())
        for size in (32, 128, 512, 2048)
    )


def test_conclusion_of_the_quadratic(results):
    own = results["quadratic"]
    plain, momentum = fit(own["plain sgd"]), fit(own["sgd"])
    exact = WORKLOADS["quadratic"].exact(WORKLOADS["quadratic"].target)["plain sgd"][1]
    assert (round(plain.critical_batch_size), round(exact)) == (53, 58)
    np.testing.assert_allclose(momentum.critical_batch_size / plain.critical_batch_size, 2, 0.15)
    saved = {
        size: 1 - own["sgd"][size].median / own["plain sgd"][size].median for size in (1, 1024)
    }
    assert round(saved[1], 2) == 0.03
    assert saved[1024] > 0.5
