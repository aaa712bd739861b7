"""The cost of a macro-batch of eight micro-batches, beside `optax.MultiSteps(optax.lamb)`.

    python -m benchmarks.accumulation_cost
    python -m benchmarks.accumulation_cost --rounds 20 --output benchmarks/results/cpu-2-cores

Every update is compiled with `optax.apply_updates`; parameters and state are donated, the gradient
is not. Micro-steps are interleaved, and their sums are compared macro-step by macro-step. A shared
machine is slow at one time and fast at another, so only the ratios are meaningful. Writes
`accumulation_cost.csv`.
"""

import argparse
from typing import Any

import numpy as np
import optax
from tqdm import tqdm

from benchmarks.harness.machine import machine
from benchmarks.harness.results import add_output, report
from benchmarks.harness.steps import start_update
from benchmarks.harness.trees import TREES
from benchmarks.harness.turns import in_turns, ratio
import optax_largebatch as lb

EVERY = 8
BASELINE = "MultiSteps(optax.lamb)"
OPTIMIZERS = {
    BASELINE: optax.MultiSteps(optax.lamb(1e-3, weight_decay=0.01), EVERY).gradient_transformation,
    "accumulate_gradients(optax.lamb)": lambda: lb.accumulate_gradients(
        optax.lamb(1e-3, weight_decay=0.01), every=EVERY
    ),
    "accumulate_gradients(lamb)": lambda: lb.accumulate_gradients(
        lb.lamb(1e-3, weight_decay=0.01), every=EVERY
    ),
}


def measure(tree: str, rounds: int) -> list[dict[str, Any]]:
    """All optimizers on one tree, a micro-step of each in turn."""
    gradients = TREES[tree].arrays()
    running = {
        name: start_update(OPTIMIZERS[name](), TREES[tree].arrays(), gradients)
        for name in tqdm(OPTIMIZERS, desc=f"{tree}: compiling")
    }
    micro_steps = in_turns(running, EVERY * rounds, left_out=EVERY, description=f"{tree}: stepping")
    seconds = {name: np.reshape(steps, (rounds, EVERY)) for name, steps in micro_steps.items()}
    baseline = seconds[BASELINE].sum(axis=1)
    rows = []
    for name, steps in seconds.items():
        # A micro-step that only adds, and the one that takes the step as well.
        waiting = np.median(np.median(steps[:, :-1], axis=1) * EVERY / baseline)
        stepping = np.median(steps[:, -1] * EVERY / baseline)
        rows.append(
            {
                "tree": tree,
                "optimizer": name,
                "parameters": running[name].parameters,
                "every": EVERY,
                **ratio(steps.sum(axis=1), baseline).as_row(3),
                "waiting": round(waiting, 3),
                "stepping": round(stepping, 3),
                "temporaries_bytes": running[name].temporaries_bytes,
                "machine": machine(),
            }
        )
    return rows


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tree", nargs="+", choices=TREES, default=["bert-base", "small"])
    parser.add_argument("--rounds", type=int, default=10, help="macro-steps of each optimizer")
    add_output(parser, "accumulation_cost")
    args = parser.parse_args()
    rows = [row for tree in args.tree for row in measure(tree, args.rounds)]
    report(rows, args.output / "accumulation_cost.csv")


if __name__ == "__main__":
    main()
