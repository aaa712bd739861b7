"""The pages say what the committed trials of the main protocol say."""

import itertools
import re

import numpy as np

from benchmarks import critical_batch_of_tokens as tokens
from benchmarks import rate_of_the_rest, transfer
from benchmarks.tuned.intervals import difference
from benchmarks.tuned.results import curves
from benchmarks.tuned.sweep import committed
from benchmarks.tuned.workloads import BERT, OPTIMIZERS, WORKLOADS
from docs import draw_evidence, write_evidence
from docs.write_evidence import RUNS, tuned
from tests.size import ROOT

TEXT = (ROOT / "docs" / "evidence.md").read_text()
PAGE = " ".join(TEXT.split())
SIZES = ("32", "128", "512", "2048")
LAYERWISE = ("adamw", "lamb", "lans")
MOVES = (("32", "512"), ("32", "2048"), ("128", "2048"))
OF_BERT, OF_CAUSAL = NETWORKS = [tuned(name)[1] for name in ("bert", "causal")]


def apart(results, name, other, batches):
    return difference(results[name][batches].losses, results[other][batches].losses)


def over_muonh(results, name, sizes=SIZES):
    """What an optimizer loses more than MuonH, in the mean, by batch size."""
    return [apart(results, name, "muonh", size).mean for size in sizes]


def least_and_most(values):
    return min(values), max(values)


def test_who_is_ahead():
    """MuonH of AdamW, LAMB and LANS everywhere, and of all at batch 2048."""
    for own in NETWORKS:
        assert set(own) == {"muonh", "muon", "adamw", "lans", "lamb"}
        assert apart(own, "muon", "muonh", "2048").low > 0
        for name, size in itertools.product(LAYERWISE, SIZES):
            assert apart(own, name, "muonh", size).low > 0


def test_muon_at_small_batches():
    assert apart(OF_BERT, "muon", "muonh", "32").high < 0
    assert not apart(OF_BERT, "muon", "muonh", "128").is_clear
    assert max(apart(OF_CAUSAL, "muon", "muonh", size).high for size in SIZES[:3]) < 0
    most, least = map(abs, least_and_most(over_muonh(OF_CAUSAL, "muon", SIZES[:3])))
    assert f"{least:.3f} to {most:.3f} ahead of MuonH up to batch 512" in PAGE
    adamw, lamb, lans = (over_muonh(OF_CAUSAL, name) for name in LAYERWISE)
    assert f"over AdamW from {adamw[0]:.3f} to {adamw[-1]:.3f}" in PAGE
    assert f"closer, to {lamb[-1]:.3f} and {lans[-1]:.3f}" in PAGE


def test_the_angles_are_in_the_first_screen():
    """The largest and the smallest that were best, the largest that was moved to, the plan's."""
    angles = [*map(write_evidence.peaks, RUNS.values()), write_evidence.peaks_of_lengths()]
    best, moved = (list(itertools.chain(*own)) for own in zip(*angles, strict=True))
    first = PAGE.partition("<!-- seen")[0]
    assert f"best peaks here are {min(best):.2g} to {max(best):.2g} radians a step" in first
    assert f"moved to {min(moved):.2g} to {max(moved):.2f}." in first
    (reached,) = re.findall(r"reaches ([0-9.]+)", (ROOT / "README.md").read_text())
    assert f"The plan on the front page peaks at {float(reached):.1g}" in first
    assert float(reached) < min(best)
    turns = [
        cell.settings.learning_rate * own.plans[batches].total_steps ** 0.5
        for own in RUNS.values()
        for batches, cell in transfer.searches(own)["muonh"].items()
    ]
    assert f"the best are {min(turns):.2g} to {max(turns):.2g} here" in first


def test_the_pictures_are_there_and_every_move_is_in_them():
    """A loss beyond the edge would be drawn at it."""
    for name in ("lead", "moves"):
        assert f"(static/{name}.png)" in TEXT
        assert (ROOT / "docs" / "static" / f"{name}.png").exists()
    for workload in RUNS.values():
        for _, ways in draw_evidence.moves(workload):
            assert max(own.mean for own in ways.values()) < draw_evidence.FARTHEST


def over_the_chosen(curve, value):
    return curve.losses[value] - curve.losses[curve.chosen]


def test_twice_the_rate():
    half, double = (
        {
            name: f"{over_the_chosen(own, float(f'{factor * own.chosen:.4g}')):.2f}"
            for name, own in curves(BERT, committed(BERT), "512", "rate").items()
        }
        for factor in (0.5, 2)
    )
    said = "loses {} at twice its chosen rate and {} at half of it."
    assert said.format(double["muonh"], half["muonh"]) in PAGE
    said = "Muon loses {muon}, LANS {lans}, AdamW {adamw} and LAMB {lamb}."
    assert said.format(**double) in PAGE


def test_the_decay():
    decays = curves(BERT, committed(BERT), "512", "decay")
    muon = -over_the_chosen(decays["muon"], 0.3)
    assert f"for Muon, which is {muon:.2f} better at 0.3" in PAGE
    assert muon > apart(OF_BERT, "muon", "muonh", "512").mean
    for name in ("lamb", "lans"):
        losses = [over_the_chosen(decays[name], value) for value in (0.0, 0.01, 0.1, 0.3)]
        assert -0.0415 < min(losses) <= max(losses) < 0.02


def test_the_momentum():
    ends = []
    for results in NETWORKS:
        cells = [own[size] for own in results.values() for size in ("32", "2048")]
        lost = [*map(write_evidence.lost_by_momentum, cells)]
        ends += [max(lost[::2]), *least_and_most(lost[1::2])]
    assert "At batch 2048 it loses {:.2f} to {:.2f}.".format(*ends[1:3]) in PAGE
    said = "loses {:.2f} (LANS) to {:.2f} (AdamW) at batch 2048, and {:.2f} at most at batch 32"
    assert said.format(*ends[4:], ends[3]) in PAGE
    long_runs = tuned("causal_long")[1]["muonh"]["512"]
    assert f"at batch 512 it loses {write_evidence.lost_by_momentum(long_runs):.3f}. (C)" in PAGE
    assert ends[0] < 0.13


def moves(name, way, results, pairs):
    """What a way to the large batch loses to the search, by pair and optimizer."""
    losses = transfer.losses_of(transfer.committed_rows(), WORKLOADS[name])
    found = {}
    for optimizer, pair in itertools.product(OPTIMIZERS, pairs):
        place = (name, optimizer, *pair)
        if own := losses.get((*place, way)):
            found[pair, optimizer] = difference(own, transfer.searched(losses, place, results))
    return found


def test_what_the_law_costs():
    law, root = (
        [moves(*own, MOVES) for own in (("bert", way, OF_BERT), ("causal", way, OF_CAUSAL))]
        for way in ("law", "sqrt")
    )
    of_muonh = [own for found in law for (_, x), own in found.items() if x == "muonh"]
    assert len(of_muonh) == 6
    assert max(own.low for own in of_muonh) < 0.02
    least, most = least_and_most([own.mean for own in of_muonh])
    assert f"{least:.2f} to {most:.2f} above a search" in PAGE
    for optimizer, both in itertools.product(OPTIMIZERS, zip(law, root, strict=True)):
        by_law, by_root = (
            np.mean([x.mean for (_, name), x in found.items() if name == optimizer])
            for found in both
        )
        assert by_law < by_root
    kept = [x.mean for x in moves("bert", "kept", OF_BERT, MOVES).values()]
    assert f"settings that nobody moves lose {min(kept):.2f} to {max(kept):.2f}" in PAGE


def test_no_other_share_is_better():
    """Of the rate of MuonH, for what Adam moves; less is clearly worse."""
    lines = rate_of_the_rest.table(write_evidence.rest_rows()).splitlines()[2:]
    quarters = [float(line.split("**+")[2][:5]) for line in lines]
    assert f"a quarter: {min(quarters):.2f} to {max(quarters):.2f} worse; four times: no" in PAGE
    for line in lines:
        cells = line.strip("| ").split(" | ")[2:]
        assert all(cell.removeprefix("**").startswith("+") for cell in cells), line


def test_moves_without_a_floor_of_the_momentum():
    table = transfer.floors_table(transfer.committed_rows(), OF_BERT)
    without = [float(line.split(" | ")[2]) for line in table.splitlines()[2:]]
    said = f"without one, moves lose {min(without):.2f} to {max(without):.2f} in the mean"
    assert said in PAGE


def test_what_the_law_costs_out_of_sample():
    law = [own.mean for x in "CD" for own in write_evidence.lost(RUNS[x], "law")]
    said = "{:+.3f} and {:+.3f} from it in runs five times as long (C), and {:+.3f} and {:+.3f}"
    assert said.format(*law) in PAGE


def test_on_images():
    of_digits, sizes = tuned("digits")[1], ("16", "128", "512")
    most, least = map(abs, least_and_most(over_muonh(of_digits, "muon", sizes)))
    assert f"{least:.3f} to {most:.3f} better at every batch (D)" in PAGE
    small, _, large = zip(*(over_muonh(of_digits, name, sizes) for name in LAYERWISE), strict=True)
    said = "from {:.3f} to {:.3f} at batch 16 to {:.3f} to {:.3f} at 512. (D)"
    assert said.format(*least_and_most(small), *least_and_most(large)) in PAGE


def test_a_plan_warns_where_the_law_fails():
    """Of each move of an optimizer that loses more than 0.1."""
    rates = {row.place: row.learning_rate for row in transfer.committed_rows()}
    trusted, warned = [], []
    for name, own in (("bert", OF_BERT), ("causal", OF_CAUSAL)):
        for (pair, optimizer), lost in moves(name, "law", own, transfer.PAIRS).items():
            high = rates[name, optimizer, *pair, "law"] > transfer.LAWS[optimizer].highest_rate
            (warned if high else trusted).append(lost.mean)
    assert max(trusted) < 0.085
    assert f"lose up to 0.08, and up to {max(warned):.2f} at rates of which the plan warns" in PAGE


def over_the_constant(own):
    """What an optimizer loses with each ramp more than with the batch at which it begins."""
    constant = own["constant"].losses
    return {plan: difference(x.losses, constant) for plan, x in own.items() if plan != "constant"}


def test_a_batch_that_grows():
    workload, results = tuned("bert_ramp")
    again = over_the_constant(tuned("causal_ramp")[1]["muonh"])
    muonh, adamw = (over_the_constant(results[name]) for name in ("muonh", "adamw"))
    steps = {name: plan.total_steps for name, plan in workload.plans.items()}
    assert {plan.examples for plan in workload.plans.values()} == {65_536}
    assert not adamw.pop("seesaw").is_clear
    assert min(x.low for own in (again, muonh, adamw) for x in own.values()) > 0
    for said in (
        f"{steps['two_stages']} steps in place of {steps['constant']}",
        f"{muonh['two_stages'].mean:.3f} above batch 128 throughout",
        f"Batch 512 throughout ends {muonh['four_times'].mean:.3f} above it.",
        f"With AdamW the two stages lose {adamw['two_stages'].mean:.3f}.",
        f"saves {1 - steps['seesaw'] / steps['constant']:.0%} of the steps",
        f"are {again['two_stages'].mean:.3f} and {again['four_times'].mean:.3f}.",
    ):
        assert said in PAGE


def test_settings_moved_along_a_ramp():
    results = tuned("bert_ramp")[1]
    pairs = [("constant", ramp) for ramp in ("two_stages", "seesaw")]
    law, kept = (moves("bert_ramp", way, results, pairs) for way in ("law", "momentum kept"))
    assert len(law) == 4
    assert all(own.mean < kept[place].mean for place, own in law.items())
    least, most = least_and_most([own.mean for own in law.values()])
    assert f"end from {-least:.2f} below [a search]" in PAGE
    assert f"to {most:.2f} above it. (A)" in PAGE


def test_the_gap_grows():
    for name in LAYERWISE:
        means = over_muonh(OF_BERT, name)
        assert means[-1] > 3 * means[0]
    for network, name in itertools.product(("bert", "causal"), (*LAYERWISE, "muon")):
        assert write_evidence.growth(network, name).low > 0


def test_the_critical_batch_grows_with_the_tokens():
    """And MuonH's is larger; its rate goes on by the root of the batch, AdamW's does not."""
    rows = draw_evidence.token_rows()
    losses = {own: tokens.losses_of(rows, own) for own in ("adamw", "muon", "muonh")}
    fits = {own: tokens.fits(x) for own, x in losses.items()}
    for target in (1, 3):
        sizes = [round(fits[own][target].critical_batch_size) for own in ("muonh", "adamw")]
        assert re.search(r"{} (windows of 16 tokens )?against {}".format(*sizes), PAGE)
    for own, x in losses.items():
        grows = tokens.exponent_by_seed(x)
        assert grows.low > 0
        assert f"{write_evidence.short(grows).strip('*+')} ({own}" in PAGE
    halves = [tokens.exponent_by_seed(x, y).mean for x in losses.values() for y in tokens.HALVES]
    assert f"{min(halves):.2f} to {max(halves):.2f} on half of the targets" in PAGE
    lead, behind = (
        [difference(*(losses[own][x][tokens.BUDGETS[-1]] for own in both)) for x in tokens.BATCHES]
        for both in (("adamw", "muonh"), ("muonh", "muon"))
    )
    assert [x.is_clear for x in lead] == [False] * 3 + [True] * 3
    assert all(x.low > 0 for x in behind)
    least, most = least_and_most([x.mean for x in behind])
    assert f"{least:.3f} to {most:.3f} in the longest runs of E" in PAGE
    assert float(tokens.rate_powers(rows, "muonh", 512)[0]) > 0.4
    assert float(tokens.rate_powers(rows, "adamw", 512)[0]) < 0.3
