"""What an optimizer adds to a whole training step, beside `optax.adamw` in the same run.

    python benchmarks/training_step.py
    python benchmarks/training_step.py --batch 32 --rounds 20 --output benchmarks/results

Loss, gradient and update of a multilayer perceptron of 57 million parameters. Steps are interleaved
and compared round by round, as in `step_cost.py`. Writes `training_step.csv`.
"""

import argparse
import csv
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from machine import machine
import numpy as np
import optax
from step_cost import BASELINE, OPTIMIZERS, Running, arrays
from tqdm import tqdm

WIDTHS = (784, 4096, 4096, 4096, 4096, 784)
NAMES = (BASELINE, "optax.lamb", "lamb", "lans", "lars", "scaled_adam")


def loss(params: list[Any], batch: jax.Array) -> jax.Array:
    """How badly the network copies its input."""
    x = batch
    for layer in params:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return jnp.mean(jnp.square(x - batch))


def prepare(name: str, batch: jax.Array) -> Running:
    """A compiled training step."""
    optimizer = OPTIMIZERS[name].make()

    def step(params: Any, state: Any, batch: jax.Array) -> tuple[Any, Any]:
        updates, state = optimizer.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    params = arrays([{"kernel": shape, "bias": shape[1:]} for shape in itertools.pairwise(WIDTHS)])
    state = jax.jit(optimizer.init)(params)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, batch).compile()
    return Running(compiled, params, state, batch)


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15, help="steps of each optimizer")
    parser.add_argument("--output", type=Path, default=Path("runs/training_step"))
    args = parser.parse_args()
    batch = jnp.asarray(np.random.default_rng(0).random((args.batch, WIDTHS[0]), "float32"))
    running = {name: prepare(name, batch) for name in tqdm(NAMES, desc="compiling")}
    for _ in tqdm(range(args.rounds + 1), desc="stepping"):
        for one in running.values():
            one.run()
    rows = []
    for name, one in running.items():
        ratios = np.divide(one.seconds[1:], running[BASELINE].seconds[1:])
        low, median, high = np.quantile(ratios, (0.1, 0.5, 0.9))
        figures = {"ratio": median, "ratio_low": low, "ratio_high": high}
        rows.append(
            {"optimizer": name, "batch": args.batch}
            | {key: round(value, 2) for key, value in figures.items()}
            | {"machine": machine()}
        )
    args.output.mkdir(parents=True, exist_ok=True)
    with (args.output / "training_step.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(machine())
    for row in rows:
        print(
            f"{row['optimizer']:<12} {row['ratio']:.2f} x adamw's training step "
            f"({row['ratio_low']:.2f}..{row['ratio_high']:.2f})"
        )


if __name__ == "__main__":
    main()
