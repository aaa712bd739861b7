"""The guide on stacked layers says what its committed runs say."""

import csv
from pathlib import Path
import statistics

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "cpu-2-cores"
RUNS = {}
for row in csv.DictReader((RESULTS / "steps_to_a_target.csv").read_text().splitlines()):
    cell = row["workload"], row["optimizer"], int(row["batch_size"])
    RUNS.setdefault(cell, []).append(float(row["steps"]))


def median(workload, name, size):
    return statistics.median_low(RUNS[workload, name, size])


def test_layers_in_a_stack():
    names = ("lamb", "lamb_one_norm", "lans", "lans_one_norm")
    guide = (ROOT / "docs" / "guides" / "stacked_layers.md").read_text()
    steps = [f"{median('deep_bert', name, 128):.0f}" for name in names]
    said = "{} steps there with a norm for each layer and {} with one for all, LANS {} and {}"
    assert said.format(*steps) in " ".join(guide.split())
    rows = csv.DictReader((RESULTS / "stack_ratios.csv").read_text().splitlines())
    stacks = [[float(x) for name, x in row.items() if name.startswith("layer_")] for row in rows]
    widest = max(stacks, key=lambda ratios: max(ratios) / min(ratios))
    assert f"jnp.array([{', '.join(f'{ratio:.2f}' for ratio in widest)}])" in guide
