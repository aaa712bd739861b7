"""The archived page of steps to a target says what its committed runs say."""

import csv
from pathlib import Path
import re
import statistics

import numpy as np
import pytest

import optax_largebatch as lb

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "cpu-2-cores"
PAGE = (ROOT / "docs" / "details" / "steps_to_a_target.md").read_text()
TEXT = " ".join(PAGE.split())
SIZES = (32, 128, 512, 2048)
RUNS = {}
for row in csv.DictReader((RESULTS / "steps_to_a_target.csv").read_text().splitlines()):
    cell = row["workload"], row["optimizer"], int(row["batch_size"])
    RUNS.setdefault(cell, []).append(float(row["steps"]))
TABLE = {
    name: [cell.replace("*", "") for cell in cells.split(" | ")]
    for name, cells in re.findall(r"^\| `([\w.]+)` \| (.*) \|$", PAGE, re.MULTILINE)
}


def median(workload, name, size):
    return statistics.median_low(RUNS[workload, name, size])


@pytest.mark.parametrize("name", TABLE)
def test_the_row_is_of_the_runs(name):
    workload = "bert_pieces" if ("bert_pieces", name, 32) in RUNS else "bert"
    runs = [RUNS[workload, name, size] for size in SIZES]
    assert {len(own) for own in runs} == {5 if workload == "bert_pieces" else 3}
    critical = lb.fit_critical_batch_size(SIZES, runs).critical_batch_size
    expected = [*(median(workload, name, size) for size in SIZES), round(critical)]
    assert TABLE[name] == [f"{number:g}" for number in expected]


def saved(before, after, workload="bert_pieces", sizes=SIZES):
    """The share of the steps, in per cent, in the geometric mean over batch sizes."""
    ratios = [median(workload, after, size) / median(workload, before, size) for size in sizes]
    return round(100 * (1 - np.exp(np.mean(np.log(ratios)))))


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("adamw", "lans", "35% (25 to 38)"),
        ("nadamw", "lans", "16% (7 to 22)"),
        ("lans_without_normalization", "lans", "14% (10 to 16)"),
        ("lans_without_nesterov", "lans", "4% (1 to 10)"),
        ("lans_without_trust_ratio", "lans", "8% (-7 to 17)"),
        ("adamw", "nadamw", "22% (9 to 29)"),
        ("adamw", "lamb", "14% (3 to 19)"),
        ("adamw", "adamw_momentum_0.8", "36% (27 to 40)"),
        ("lamb", "lamb_momentum_0.8", "27% (25 to 29)"),
        ("lans", "lans_momentum_0.8", "15% (12 to 21)"),
        ("muon", "muon_momentum_0.8", "9% (4 to 15)"),
        ("adamw_momentum_0.8", "lans_momentum_0.8", "14% (8 to 20)"),
        ("adamw_momentum_0.8", "muon_momentum_0.8", "25% (20 to 30)"),
        ("adamw", "muon", "47% (39 to 50)"),
        ("lans", "muon", "19% (15 to 23)"),
        ("muon", "muon_and_adamw", "15% (10 to 19)"),
    ],
)
def test_what_a_piece_saves(before, after, said):
    assert said in TEXT
    assert saved(before, after) == int(said.partition("%")[0])


def test_layers_in_a_stack():
    names = ("lamb", "lamb_one_norm", "lans", "lans_one_norm")
    assert [median("deep_bert", name, 128) for name in names] == [247, 221, 177, 191]
    rows = csv.DictReader((RESULTS / "stack_ratios.csv").read_text().splitlines())
    stacks = [[float(x) for name, x in row.items() if name.startswith("layer_")] for row in rows]
    widest = max(stacks, key=lambda ratios: max(ratios) / min(ratios))
    guide = (ROOT / "docs" / "guides" / "stacked_layers.md").read_text()
    assert f"jnp.array([{', '.join(f'{ratio:.2f}' for ratio in widest)}])" in guide
