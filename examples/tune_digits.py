"""Looks for the learning rates with which `train_digits.py` compares optimizers.

    python examples/tune_digits.py --output benchmarks/results/cpu-2-cores
    python examples/tune_digits.py --optimizer muonh --batch-size 1024

Each optimizer gets the same trials: at each batch the rates below, with two seeds that the
comparison does not use. The best rate reaches the target in the fewest steps, among those whose
validation accuracy at the end is within a hundredth of the best. `digits_rates.csv` gets a row for
each run. The program can be stopped: started again, it runs what is missing.
"""

import argparse
from collections.abc import Mapping, Sequence
import csv
import itertools
import math
from pathlib import Path

import numpy as np

from bookkeeping import COUNT, Table
from comparison import in_words
from digits import DEFAULTS, load_data
from train_digits import parse_arguments, train

RATES = (0.01, 0.03, 0.1, 0.3)  # two values for each factor of ten
SEEDS = (1000, 1001)
FILE = "digits_rates.csv"
CELL = ("optimizer", "batch_size")


def read(path: Path) -> list[dict[str, str]]:
    """The rows of the file, none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def best_rate(rows: Sequence[Mapping[str, str]]) -> float:
    """The best rate among the trials of one optimizer at one batch size."""
    accuracies, steps = (
        {
            rate: np.mean([shown(row[column]) for row in own])
            for rate, own in itertools.groupby(rows, lambda row: float(row["learning_rate"]))
        }
        for column, shown in (
            ("validation_accuracy", float),
            ("steps_to_target", lambda text: math.inf if text == "never" else float(text)),
        )
    )
    good = [rate for rate, own in accuracies.items() if own >= max(accuracies.values()) - 0.01]
    return min(good, key=steps.__getitem__)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what is missing, and prints the best rates."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add, names = parser.add_argument, tuple(DEFAULTS)
    add("--optimizer", nargs="+", choices=names, default=names[:4], help="one or more")
    add("--batch-size", nargs="+", type=COUNT, default=(32, 1024), help="one or more")
    add("--output", type=Path, default=Path("runs/digits"), help="folder of the table")
    args = parser.parse_args(argv)
    data = load_data()
    data = data._replace(test=data.validation)  # the test set chooses nothing
    rows = read(args.output / FILE)
    table = Table(args.output / FILE, keep=len(rows))
    for name, batch_size in itertools.product(args.optimizer, args.batch_size):
        cell = [row for row in rows if (name, str(batch_size)) == tuple(row[x] for x in CELL)]
        for rate in RATES:
            finished = {row["seed"] for row in cell if float(row["learning_rate"]) == rate}
            missing = [seed for seed in SEEDS if str(seed) not in finished]
            options = parse_arguments(["--learning-rate", str(rate)])
            for run in train(name, batch_size, missing, data, options):
                row = {
                    "optimizer": name,
                    "batch_size": str(batch_size),
                    "learning_rate": str(rate),
                    "seed": str(run.seed),
                    "steps_to_target": in_words(run.steps_to_target),
                    "validation_accuracy": f"{run.test_accuracy:.4f}",
                }
                table.append(row)
                cell.append(row)
        cell.sort(key=lambda row: float(row["learning_rate"]))
        print(f"{name}, batch {batch_size}: best learning rate {best_rate(cell):g}", flush=True)


if __name__ == "__main__":
    main()
