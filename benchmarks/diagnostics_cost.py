"""What reading a run adds to a step of `lamb`, in the same run.

    python benchmarks/diagnostics_cost.py
    python benchmarks/diagnostics_cost.py --rounds 30 --output benchmarks/results

The step that is read has a `gradient_noise_scale` first in its chain and returns, besides
parameters and state, the noise scale with its band, of the whole and by layer, and the trust
ratios. Steps are interleaved and compared round by round with the same step without all that, as
in `step_cost.py`:

- `update`: the optimizer's step alone, on the tree of BERT-base;
- `training step`: that of `training_step.py`, a network of 57 million parameters;
- `macro-batch`: the same in four micro-batches, whose norms are taken on the way.

The first two are given the norms of the small batches. The plain step is compared with a copy of
itself, too: what that says is noise. `bytes` are those that XLA counts in the step, over those of
the plain step. Writes `diagnostics_cost.csv`.
"""

import argparse
from collections.abc import Callable
import csv
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from machine import machine
import numpy as np
import optax
from step_cost import TREES, Running, arrays
from tqdm import tqdm
from training_step import WIDTHS, loss

import optax_largebatch as lb

PLAIN, COPY, READ = "plain", "plain again", "read"
MICRO_BATCHES = 4
Step = Callable[[optax.GradientTransformationExtraArgs, Any, Any, Any, Any], tuple[Any, Any]]
"""Takes optimizer, parameters, state, small batches and what it works on."""


def readings(state: Any, params: Any) -> Any:
    """All that can be read of the state of the step that is read."""
    return (
        lb.noise_scale(state),
        lb.layer_noise_scales(state, params),
        lb.trust_ratios(state, params),
    )


def updated(optimizer: Any, params: Any, state: Any, parts: Any, gradients: Any) -> Any:
    """A step of the optimizer alone."""
    updates, state = optimizer.update(gradients, state, params, small_batches=parts)
    return optax.apply_updates(params, updates), state


def trained(optimizer: Any, params: Any, state: Any, parts: Any, batch: jax.Array) -> Any:
    """A training step."""
    return updated(optimizer, params, state, parts, jax.grad(loss)(params, batch))


def accumulated(optimizer: Any, params: Any, state: Any, parts: Any, batch: jax.Array) -> Any:
    """A training step in micro-batches; the optimizer takes their norms by itself."""
    del parts
    for part in jnp.split(batch, MICRO_BATCHES):
        updates, state = optimizer.update(jax.grad(loss)(params, part), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def prepare(step: Step, shapes: Any, given: Any, name: str) -> Running:
    """A compiled step; what is read stands beside the state."""
    read = name == READ
    optimizer = lb.lamb(1e-3, weight_decay=0.01)
    if read:
        optimizer = lb.chain(lb.gradient_noise_scale(), optimizer)
    if step is accumulated:
        optimizer = lb.accumulate_gradients(optimizer, MICRO_BATCHES, small_batches=read)
    params = arrays(shapes)
    blocks = len(jax.tree.leaves(params))
    parts = lb.SmallBatches(jnp.ones(blocks), jnp.float32(8), jnp.float32(256))

    def whole(params: Any, state: Any, given: Any) -> tuple[Any, Any]:
        params, state = step(optimizer, params, state[0], parts, given)
        return params, (state, readings(state, params) if read else ())

    state = jax.jit(optimizer.init)(params)
    state = (state, jax.jit(readings)(state, params) if read else ())
    compiled = jax.jit(whole, donate_argnums=(0, 1))
    return Running(compiled.lower(params, state, given).compile(), params, state, given)


def measure(case: str, rounds: int, batch: int) -> list[dict[str, Any]]:
    """The ratios of one case to the plain step."""
    examples = jnp.asarray(np.random.default_rng(0).random((batch, WIDTHS[0]), "float32"))
    network = [{"kernel": shape, "bias": shape[1:]} for shape in itertools.pairwise(WIDTHS)]
    bert = TREES["bert-base"].shapes()
    cases: dict[str, tuple[Step, Any, Any]] = {
        "update": (updated, bert, None),
        "training step": (trained, network, examples),
        "macro-batch": (accumulated, network, examples),
    }
    step, shapes, given = cases[case]
    given = arrays(shapes) if given is None else given
    names = (PLAIN, COPY, READ)
    running = {
        name: prepare(step, shapes, given, name) for name in tqdm(names, desc=f"{case}: compiling")
    }
    orders = np.random.default_rng(0)
    for _ in tqdm(range(rounds + 1), desc=f"{case}: stepping"):
        for index in orders.permutation(len(names)):  # what runs after what must not matter
            running[names[index]].run()
    rows = []
    for name in (COPY, READ):
        ratios = np.divide(running[name].seconds[1:], running[PLAIN].seconds[1:])
        low, median, high = np.quantile(ratios, (0.1, 0.5, 0.9))
        least = min(running[name].seconds[1:]) / min(running[PLAIN].seconds[1:])
        moved, plain = (
            running[own].step.cost_analysis()["bytes accessed"] for own in (name, PLAIN)
        )
        figures = {"ratio": median, "ratio_low": low, "ratio_high": high}
        figures |= {"ratio_of_least": least, "bytes": moved / plain}
        rows.append(
            {"case": case, "step": name, "rounds": rounds}
            | {key: round(value, 3) for key, value in figures.items()}
            | {"machine": machine()}
        )
    return rows


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    cases = ("update", "training step", "macro-batch")
    parser.add_argument("--case", nargs="+", choices=cases, default=cases)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20, help="steps of each")
    parser.add_argument("--output", type=Path, default=Path("runs/diagnostics_cost"))
    args = parser.parse_args()
    rows = [row for case in args.case for row in measure(case, args.rounds, args.batch)]
    args.output.mkdir(parents=True, exist_ok=True)
    with (args.output / "diagnostics_cost.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(machine())
    for row in rows:
        print(
            f"{row['case']:<14} {row['step']:<12} {row['ratio']:.3f} x the plain step "
            f"({row['ratio_low']:.3f}..{row['ratio_high']:.3f}), of the fastest "
            f"{row['ratio_of_least']:.3f}, bytes {row['bytes']:.3f}"
        )


if __name__ == "__main__":
    main()
