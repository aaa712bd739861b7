"""What a macro-batch of eight micro-batches costs, beside `optax.MultiSteps(optax.lamb)`.

    python benchmarks/accumulation_cost.py
    python benchmarks/accumulation_cost.py --quick
    python benchmarks/accumulation_cost.py --rounds 20 --output benchmarks/results/cpu-2-cores

Every update is compiled with `optax.apply_updates`; parameters and state are donated, the gradient
is not. Micro-steps are interleaved and their sums compared macro-step by macro-step, because a
shared machine is slow at one time and fast at another: only the ratios mean something. Writes
`accumulation_cost.csv`.
"""

import argparse
import csv
from pathlib import Path
from typing import Any

import jax
from machine import machine
import numpy as np
import optax
from step_cost import TREES, Running, arrays
from tqdm import tqdm

import optax_largebatch as lb

EVERY = 8
BASELINE = "MultiSteps(optax.lamb)"
OPTIMIZERS = {
    BASELINE: optax.MultiSteps(optax.lamb(1e-3, weight_decay=0.01), EVERY).gradient_transformation,
    "accumulate_gradients(optax.lamb)": lambda: lb.accumulate_gradients(
        optax.lamb(1e-3, weight_decay=0.01), EVERY
    ),
    "accumulate_gradients(lamb)": lambda: lb.accumulate_gradients(
        lb.lamb(1e-3, weight_decay=0.01), EVERY
    ),
}


def prepare(name: str, tree: str, gradients: Any) -> tuple[Running, int]:
    """A compiled micro-step, and the bytes of its temporaries."""
    optimizer = OPTIMIZERS[name]()

    def step(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    params = arrays(TREES[tree].shapes(), TREES[tree].dtype)
    state = jax.jit(optimizer.init)(params)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, gradients).compile()
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    return Running(compiled, params, state, gradients), temporaries


def measure(tree: str, rounds: int) -> list[dict[str, Any]]:
    """All optimizers on one tree, a micro-step of each in turn."""
    gradients = arrays(TREES[tree].shapes(), TREES[tree].dtype)
    prepared = {
        name: prepare(name, tree, gradients) for name in tqdm(OPTIMIZERS, desc=f"{tree}: compiling")
    }
    for _ in tqdm(range(EVERY * (rounds + 1)), desc=f"{tree}: stepping"):
        for running, _ in prepared.values():
            running.run()

    def seconds(name: str) -> np.ndarray:
        """(macro-steps, micro-steps), without the first, which touches its memory anew."""
        return np.reshape(prepared[name][0].seconds, (-1, EVERY))[1:]

    baseline = seconds(BASELINE).sum(axis=1)
    rows = []
    for name, (running, temporaries) in prepared.items():
        own = seconds(name)
        low, median, high = np.quantile(own.sum(axis=1) / baseline, (0.1, 0.5, 0.9))
        # A micro-step that only adds, and the one that takes the step as well.
        waiting = np.median(np.median(own[:, :-1], axis=1) * EVERY / baseline)
        stepping = np.median(own[:, -1] * EVERY / baseline)
        rows.append(
            {
                "tree": tree,
                "optimizer": name,
                "parameters": sum(x.size for x in jax.tree.leaves(running.params)),
                "every": EVERY,
                "ratio": round(median, 3),
                "ratio_low": round(low, 3),
                "ratio_high": round(high, 3),
                "waiting": round(waiting, 3),
                "stepping": round(stepping, 3),
                "temporaries_bytes": temporaries,
                "machine": machine(),
            }
        )
    return rows


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tree", nargs="+", choices=TREES, default=["bert-base", "small"])
    parser.add_argument("--rounds", type=int, default=10, help="macro-steps of each optimizer")
    parser.add_argument("--quick", action="store_true", help="3 macro-steps of the small tree")
    parser.add_argument("--output", type=Path, default=Path("runs/accumulation_cost"))
    args = parser.parse_args()
    trees, rounds = (["small"], 3) if args.quick else (args.tree, args.rounds)
    rows = [row for tree in trees for row in measure(tree, rounds)]
    args.output.mkdir(parents=True, exist_ok=True)
    with (args.output / "accumulation_cost.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(machine())
    print(
        f"{'tree':<20} {'optimizer':<33} {'macro-step':>10} {'10%..90%':>12} "
        f"{'waiting':>8} {'stepping':>9} {'temporaries':>12}"
    )
    for row in rows:
        print(
            f"{row['tree']:<20} {row['optimizer']:<33} {row['ratio']:>10.3f} "
            f"{row['ratio_low']:>5.3f}..{row['ratio_high']:<5.3f} "
            f"{row['waiting']:>8.3f} {row['stepping']:>9.3f} "
            f"{row['temporaries_bytes'] / 1e6:>9.1f} MB"
        )


if __name__ == "__main__":
    main()
