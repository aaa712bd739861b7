"""Looks for the learning rates with which `train_digits.py` compares optimizers.

    python examples/tune_digits.py --output benchmarks/results/cpu-2-cores
    python examples/tune_digits.py --optimizer muonh --batch-size 1024

Each optimizer gets the same trials: at each batch the rates below, with two seeds that the
comparison does not use. The best rate reaches the target in the fewest steps, among those whose
validation accuracy at the end is within a hundredth of the best. `digits_rates.csv` gets a row for
each run. The program can be stopped: started again, it runs what is missing.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
import csv
import itertools
import math
from pathlib import Path
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from bookkeeping import COUNT, Table
from comparison import in_words
from digits import DEFAULTS, ConvNet, load_data, shuffled
from train_digits import accuracy, build_optimizer

RATES = (0.01, 0.03, 0.1, 0.3)  # two values for each factor of ten
SEEDS = (1000, 1001)
EPOCHS, TARGET = 40, 0.95
FILE = "digits_rates.csv"

Trial = tuple[str, int, float, int]  # an optimizer, a batch size, a rate and a seed


def trained(name: str, batch_size: int, trials: Sequence[Trial]) -> Iterator[dict[str, Any]]:
    """A row for each trial of this optimizer and batch size."""
    data = load_data()
    images, labels = data.train
    epoch = len(labels) / batch_size
    steps, settings = round(EPOCHS * epoch), DEFAULTS[name]

    def optimizer(rate: Any) -> optax.GradientTransformation:
        decayed = settings.momentum, settings.weight_decay
        return build_optimizer(name, rate, *decayed, 1, epoch, steps)

    @jax.jit  # once for all rates
    def train_step(rate: Any, params: Any, state: Any, images: Any, labels: Any) -> Any:
        def loss_of(params: Any) -> jax.Array:
            logits = nnx.merge(graph, params)(images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        updates, state = optimizer(rate).update(jax.grad(loss_of)(params), state, params)
        return optax.apply_updates(params, updates), state

    for _, _, rate, seed in trials:
        graph, params = nnx.split(ConvNet(nnx.Rngs(seed)))
        state, reached = optimizer(rate).init(params), math.inf
        order = shuffled(len(labels), steps * batch_size, seed).reshape(steps, batch_size)
        for step, batch in enumerate(order):
            params, state = train_step(
                jnp.float32(rate), params, state, images[batch], labels[batch]
            )
            if reached == math.inf and accuracy(graph, params, *data.validation) >= TARGET:
                reached = step + 1
        yield {
            "optimizer": name,
            "batch_size": batch_size,
            "learning_rate": rate,
            "seed": seed,
            "steps_to_target": in_words(reached),
            "validation_accuracy": f"{accuracy(graph, params, *data.validation):.4f}",
        }


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
    done = read(args.output / FILE)
    table = Table(args.output / FILE, keep=len(done))
    keys = ("optimizer", "batch_size", "learning_rate", "seed")
    finished = {tuple(row[key] for key in keys) for row in done}
    for name, batch_size in itertools.product(args.optimizer, args.batch_size):
        trials = [
            trial
            for trial in itertools.product((name,), (batch_size,), RATES, SEEDS)
            if tuple(map(str, trial)) not in finished
        ]
        for row in trained(name, batch_size, trials):
            table.append(row)
        own = [
            row
            for row in read(table.path)
            if (row["optimizer"], row["batch_size"]) == (name, str(batch_size))
        ]
        print(f"{name}, batch {batch_size}: best learning rate {best_rate(own):g}", flush=True)


if __name__ == "__main__":
    main()
