"""The pages say what the committed trials of the main protocol say."""

import itertools
from pathlib import Path
import re
import runpy

import numpy as np
import pytest

from benchmarks import critical_batch_of_tokens as tokens
from benchmarks import transfer
from benchmarks.tuned.intervals import difference
from benchmarks.tuned.results import curves
from benchmarks.tuned.sweep import committed
from benchmarks.tuned.workloads import BERT, OPTIMIZERS, WORKLOADS
from docs import draw_evidence

ROOT = Path(__file__).parents[2]
SIZES = ("32", "128", "512", "2048")
MOVES = (("32", "512"), ("32", "2048"), ("128", "2048"))


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "docs" / "write_evidence.py"))


@pytest.fixture(scope="module")
def results(script):
    return script["tuned"]("bert")[1]


@pytest.fixture(scope="module")
def of_causal(script):
    return script["tuned"]("causal")[1]


@pytest.fixture(scope="module")
def page():
    return " ".join((ROOT / "docs" / "evidence.md").read_text().split())


def apart(results, name, other, batches):
    return difference(results[name][batches].losses, results[other][batches].losses)


def test_who_is_ahead(results, of_causal):
    """MuonH of AdamW, LAMB and LANS everywhere, and of all at batch 2048."""
    for own in (results, of_causal):
        assert set(own) == {"muonh", "muon", "adamw", "lans", "lamb"}
        assert all(apart(own, name, "muonh", "2048").low > 0 for name in own if name != "muonh")
        for name, size in itertools.product(("adamw", "lamb", "lans"), SIZES):
            assert apart(own, name, "muonh", size).low > 0


def test_muon_at_small_batches(results, of_causal, page):
    assert apart(results, "muon", "muonh", "32").high < 0
    assert not apart(results, "muon", "muonh", "128").is_clear
    ahead = [-apart(of_causal, "muon", "muonh", size).mean for size in SIZES[:3]]
    assert max(apart(of_causal, "muon", "muonh", size).high for size in SIZES[:3]) < 0
    assert f"{min(ahead):.3f} to {max(ahead):.3f} ahead of MuonH up to batch 512" in page
    lead = [apart(of_causal, "adamw", "muonh", size).mean for size in ("32", "2048")]
    assert "over AdamW from {:.3f} to {:.3f}".format(*lead) in page
    others = [apart(of_causal, name, "muonh", "2048").mean for name in ("lamb", "lans")]
    assert "closer, to {:.3f} and {:.3f}".format(*others) in page


def test_the_angles_are_in_the_first_screen(script, page):
    """The largest and the smallest that were best, the largest that was moved to, the plan's."""
    angles = [script["peaks"](workload) for workload in script["RUNS"].values()]
    angles.append(script["peaks_of_lengths"]())
    best, moved = (list(itertools.chain(*own)) for own in zip(*angles, strict=True))
    first = page.partition("<!-- seen")[0]
    assert f"best peaks here are {min(best):.2g} to {max(best):.2g} radians a step" in first
    assert f"moved to {min(moved):.2g} to {max(moved):.2f}." in first
    (reached,) = re.findall(r"reaches ([0-9.]+)", (ROOT / "README.md").read_text())
    assert f"The plan on the front page peaks at {float(reached):.1g}" in first
    assert float(reached) < min(best)
    turns = [
        cell.settings.learning_rate * own.plans[batches].total_steps ** 0.5
        for own in script["RUNS"].values()
        for batches, cell in transfer.searches(own)["muonh"].items()
    ]
    assert f"the best are {min(turns):.2g} to {max(turns):.2g} here" in first


def test_the_pictures_are_there_and_every_move_is_in_them(script):
    """A loss beyond the edge would be drawn at it."""
    for name in ("lead", "moves"):
        assert f"(static/{name}.png)" in (ROOT / "docs" / "evidence.md").read_text()
        assert (ROOT / "docs" / "static" / f"{name}.png").exists()
    for workload in script["RUNS"].values():
        for _, ways in draw_evidence.moves(workload):
            assert max(own.mean for own in ways.values()) < draw_evidence.FARTHEST


def over_the_chosen(curve, value):
    return curve.losses[value] - curve.losses[curve.chosen]


def times_the_rate(workload, factor):
    """The loss at so many times the chosen rate, over that of the chosen one, by optimizer."""
    return {
        name: over_the_chosen(own, float(f"{factor * own.chosen:.4g}"))
        for name, own in curves(workload, committed(workload), "512", "rate").items()
    }


def test_twice_the_rate(page):
    half, double = (
        {name: f"{loss:.2f}" for name, loss in times_the_rate(*own).items()}
        for own in ((BERT, 0.5), (BERT, 2))
    )
    for said in (
        f"loses {double['muonh']} at twice its chosen rate and {half['muonh']} at half of it.",
        "Muon loses {muon}, LANS {lans}, AdamW {adamw} and LAMB {lamb}.".format(**double),
    ):
        assert said in page


def test_the_decay(results, page):
    decays = curves(BERT, committed(BERT), "512", "decay")
    muon = -over_the_chosen(decays["muon"], 0.3)
    assert f"for Muon, which is {muon:.2f} better at 0.3" in page
    assert muon > apart(results, "muon", "muonh", "512").mean
    for name in ("lamb", "lans"):
        losses = [over_the_chosen(decays[name], value) for value in (0.0, 0.01, 0.1, 0.3)]
        assert -0.0415 < min(losses) <= max(losses) < 0.02


def test_the_momentum(script, page):
    ends = []
    for network in ("bert", "causal"):
        lines = script["momentum_table"](network).replace(" |", "").splitlines()[2:]
        small, *_, large = zip(
            *([float(x) for x in line.split()[2:]] for line in lines), strict=True
        )
        ends += [max(small), min(large), max(large)]
    assert "At batch 2048 it loses {:.2f} to {:.2f}.".format(*ends[1:3]) in page
    said = "loses {:.2f} (LANS) to {:.2f} (AdamW) at batch 2048, and {:.2f} at most at batch 32"
    assert said.format(*ends[4:], ends[3]) in page
    long_runs = script["tuned"]("causal_long")[1]["muonh"]["512"]
    assert f"at batch 512 it loses {script['lost_by_momentum'](long_runs):.3f}. (C)" in page
    assert ends[0] < 0.13


def moves(name, way, results, pairs):
    """What a way to the large batch loses to the search, by pair and optimizer."""
    workload = WORKLOADS[name]
    losses = transfer.losses_of(transfer.committed_rows(), workload)
    found = {}
    for optimizer, pair in itertools.product(OPTIMIZERS, pairs):
        place = (name, optimizer, *pair)
        if own := losses.get((*place, way)):
            found[pair, optimizer] = difference(own, transfer.searched(losses, place, results))
    return found


def test_what_the_law_costs(script, results, of_causal, page):
    networks = {"bert": results, "causal": of_causal}
    law, root = (
        {name: moves(name, way, own, MOVES) for name, own in networks.items()}
        for way in ("law", "sqrt")
    )
    of_muonh = [own for found in law.values() for (_, x), own in found.items() if x == "muonh"]
    assert len(of_muonh) == 6
    assert max(own.low for own in of_muonh) < 0.02
    least, most = (f"{own(x.mean for x in of_muonh):.2f}" for own in (min, max))
    assert f"{least} to {most} above a search" in page
    for optimizer, name in itertools.product(OPTIMIZERS, networks):
        means = [
            np.mean([x.mean for (_, own), x in y[name].items() if own == optimizer])
            for y in (law, root)
        ]
        assert means[0] < means[1]
    kept = [x.mean for x in moves("bert", "kept", results, MOVES).values()]
    assert f"settings that nobody moves lose {min(kept):.2f} to {max(kept):.2f}" in page


def test_no_other_share_is_better(script, page):
    """Of the rate of MuonH, for what Adam moves; less is clearly worse."""
    lines = script["rate_of_the_rest"].table(script["rest_rows"]()).splitlines()[2:]
    quarters = [float(line.split("**+")[2][:5]) for line in lines]
    assert f"a quarter: {min(quarters):.2f} to {max(quarters):.2f} worse; four times: no" in page
    for line in lines:
        cells = line.strip("| ").split(" | ")[2:]
        assert all(cell.removeprefix("**").startswith("+") for cell in cells), line


def test_moves_without_a_floor_of_the_momentum(script, page):
    table = script["transfer"].floors_table(transfer.committed_rows(), script["tuned"]("bert")[1])
    without = [float(line.split(" | ")[2]) for line in table.splitlines()[2:]]
    said = f"without one, moves lose {min(without):.2f} to {max(without):.2f} in the mean"
    assert said in page


def test_what_the_law_costs_out_of_sample(script, page):
    law = [own.mean for x in "CD" for own in script["lost"](script["RUNS"][x], "law")]
    said = "{:+.3f} and {:+.3f} from it in runs five times as long (C), and {:+.3f} and {:+.3f}"
    assert said.format(*law) in page


def test_on_images(script, page):
    of_digits = script["tuned"]("digits")[1]
    leads = [
        [apart(of_digits, name, "muonh", size).mean for name in ("adamw", "lamb", "lans")]
        for size in ("16", "512")
    ]
    ahead = [-apart(of_digits, "muon", "muonh", size).mean for size in ("16", "128", "512")]
    assert f"{min(ahead):.3f} to {max(ahead):.3f} better at every batch (D)" in page
    spans = (f"{min(own):.3f} to {max(own):.3f} at" for own in leads)
    assert "from {} batch 16 to {} 512. (D)".format(*spans) in page


def test_a_plan_warns_where_the_law_fails(results, of_causal, page):
    """Of each move of an optimizer that loses more than 0.1."""
    rates = {row.place: row.learning_rate for row in transfer.committed_rows()}
    trusted, warned = [], []
    for name, own in (("bert", results), ("causal", of_causal)):
        for (pair, optimizer), lost in moves(name, "law", own, transfer.PAIRS).items():
            high = rates[name, optimizer, *pair, "law"] > transfer.LAWS[optimizer].highest_rate
            (warned if high else trusted).append(lost.mean)
    assert max(trusted) < 0.085
    assert f"lose up to 0.08, and up to {max(warned):.2f} at rates of which the plan warns" in page


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
    ):
        assert said in page


def test_settings_moved_along_a_ramp(script, page):
    _, results = script["tuned"]("bert_ramp")
    pairs = [("constant", ramp) for ramp in ("two_stages", "seesaw")]
    law, kept = (moves("bert_ramp", way, results, pairs) for way in ("law", "momentum kept"))
    assert len(law) == 4
    assert all(own.mean < kept[place].mean for place, own in law.items())
    least, most = (own(x.mean for x in law.values()) for own in (min, max))
    assert f"end from {-least:.2f} below [a search]" in page
    assert f"to {most:.2f} above it. (A)" in page


def apart_of(own, plan):
    return difference(own[plan].losses, own["constant"].losses)


def test_the_gap_grows(script, results, of_causal):
    for name in ("adamw", "lamb", "lans"):
        means = [apart(results, name, "muonh", size).mean for size in SIZES]
        assert means[-1] > 3 * means[0]
    for network, own in (("bert", results), ("causal", of_causal)):
        assert all(script["growth"](network, name).low > 0 for name in own if name != "muonh")


def test_the_critical_batch_grows_with_the_tokens(script, page):
    """And MuonH's is larger; its rate goes on by the root of the batch, AdamW's does not."""
    rows = script["token_rows"]()
    losses = {own: tokens.losses_of(rows, own) for own in ("adamw", "muon", "muonh")}
    fits = {own: tokens.fits(x) for own, x in losses.items()}
    for target in (1, 3):
        sizes = [round(fits[own][target].critical_batch_size) for own in ("muonh", "adamw")]
        assert re.search(r"{} (windows of 16 tokens )?against {}".format(*sizes), page)
    for own, x in losses.items():
        grows = tokens.exponent_by_seed(x)
        assert grows.low > 0
        assert f"{script['short'](grows).strip('*+')} ({own}" in page
    halves = [tokens.exponent_by_seed(x, y).mean for x in losses.values() for y in tokens.HALVES]
    assert f"{min(halves):.2f} to {max(halves):.2f} on half of the targets" in page
    longest = {own: {size: x[size][tokens.BUDGETS[-1]] for size in x} for own, x in losses.items()}
    lead = [difference(longest["adamw"][x], longest["muonh"][x]) for x in tokens.BATCHES]
    assert [x.is_clear for x in lead] == [False] * 3 + [True] * 3
    behind = [difference(longest["muonh"][x], longest["muon"][x]) for x in tokens.BATCHES]
    assert all(x.low > 0 for x in behind)
    means = [x.mean for x in behind]
    assert f"{min(means):.3f} to {max(means):.3f} in the longest runs of E" in page
    assert float(tokens.rate_powers(rows, "muonh", 512)[0]) > 0.4
    assert float(tokens.rate_powers(rows, "adamw", 512)[0]) < 0.3
