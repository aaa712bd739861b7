"""The time of whole training steps, compared with `optax.adamw` in the same run.

    python -m benchmarks.training_step
    python -m benchmarks.training_step --batch 32 --rounds 20 --output benchmarks/results
    python -m benchmarks.training_step --batch 32768 --optimizer lamb muon muonh      # on a GPU

Loss, gradient and update of a multilayer perceptron of 57 million parameters. Steps are interleaved
and compared round by round, as in `step_cost`. Writes `training_step.csv`.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from benchmarks.harness.machine import machine
from benchmarks.harness.optimizers import BASELINE, OPTIMIZERS
from benchmarks.harness.results import add_output, report
from benchmarks.harness.steps import Running, start, updated
from benchmarks.harness.trees import arrays, perceptron
from benchmarks.harness.turns import in_turns, ratio

WIDTHS = (784, 4096, 4096, 4096, 4096, 784)
NAMES = ("optax.lamb", "lamb", "lans", "lars", "scaled_adam")


def loss(params: list[Any], batch: jax.Array) -> jax.Array:
    """The loss: how badly the network copies its input."""
    x = batch
    for layer in params:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return jnp.mean(jnp.square(x - batch))


def prepare(name: str, batch: jax.Array) -> Running:
    """A compiled training step."""
    optimizer = OPTIMIZERS[name].make()

    def step(params: Any, state: Any, batch: jax.Array) -> tuple[Any, Any]:
        return updated(optimizer, jax.grad(loss)(params, batch), params, state)

    params = arrays(perceptron(WIDTHS))
    return start(step, params, jax.jit(optimizer.init)(params), batch)


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--optimizer", nargs="+", choices=OPTIMIZERS, default=NAMES)
    parser.add_argument("--rounds", type=int, default=15, help="steps of each optimizer")
    add_output(parser, "training_step")
    args = parser.parse_args()
    batch = jnp.asarray(np.random.default_rng(0).random((args.batch, WIDTHS[0]), "float32"))
    names = dict.fromkeys([BASELINE, *args.optimizer])
    running = {name: prepare(name, batch) for name in tqdm(names, desc="compiling")}
    seconds = in_turns(running, args.rounds, description="stepping")
    rows = [
        {"optimizer": name, "batch": args.batch}
        | ratio(steps, seconds[BASELINE]).as_row(2)
        | {"machine": machine()}
        for name, steps in seconds.items()
    ]
    report(rows, args.output / "training_step.csv")


if __name__ == "__main__":
    main()
