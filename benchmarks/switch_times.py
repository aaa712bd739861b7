"""The time of a step with each switch of the plan of one GPU off, beside the plan as it is.

    python -m benchmarks.switch_times
    python -m benchmarks.switch_times --tree small --rounds 20

What the switches do is in `optax_largebatch/engine/execution_plans.py`, and what XLA makes of a
step without them in `benchmarks/compiled_step/switches.py`. A call takes `--turns` steps in one
program, so that its time is the device's (see `benchmarks/device_time.py`). Calls are taken in
turns, all on the same arrays, and compared turn by turn: `ratio` is the time without the switch
over that of the plan. Writes `switch_times.csv`.
"""

import argparse
from concurrent.futures import ThreadPoolExecutor
import dataclasses
import time
from typing import Any

import jax
from tqdm import tqdm

from benchmarks.harness.machine import machine
from benchmarks.harness.optimizers import OPTIMIZERS, made_for
from benchmarks.harness.plan_switches import switches_of, without
from benchmarks.harness.results import add_output, report
from benchmarks.harness.steps import in_a_loop, step_of
from benchmarks.harness.trees import TREES
from benchmarks.harness.turns import in_turns, ratio
from optax_largebatch.engine.execution_plans import ONE_GPU


@dataclasses.dataclass
class Variant:
    """A compiled step, and the arrays that all variants share."""

    compiled: jax.stages.Compiled
    arrays: list[Any]
    """Parameters, state and gradients."""

    def run(self) -> float:
        """Takes a step and returns how many seconds it took."""
        start = time.perf_counter()
        self.arrays[:2] = jax.block_until_ready(self.compiled(*self.arrays))
        return time.perf_counter() - start


def measure(tree: str, name: str, turns: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each switch."""
    optimizer = made_for(name, TREES[tree])
    params, gradients = TREES[tree].arrays(), TREES[tree].arrays()
    arrays = [params, jax.jit(optimizer.init)(params), gradients]
    steps = in_a_loop(step_of(optimizer), turns)
    lowered = {}
    for switch in ("", *switches_of(ONE_GPU)):
        jax.clear_caches()  # of what was traced with another switch
        with without(ONE_GPU, switch):
            lowered[switch] = jax.jit(steps, donate_argnums=(0, 1)).lower(*arrays)
    with ThreadPoolExecutor() as threads:
        compiled = dict(
            zip(lowered, threads.map(lambda x: x.compile(), lowered.values()), strict=True)
        )
    variants = {switch: Variant(own, arrays) for switch, own in compiled.items()}
    # The plan stands twice: what the two differ by is noise.
    seconds = in_turns(variants | {"nothing": variants[""]}, rounds)
    return [
        {
            "tree": tree,
            "optimizer": name,
            "without": switch,
            **ratio(own, seconds[""]).as_row(3),
            "rounds": rounds,
            "machine": machine(),
        }
        for switch, own in seconds.items()
        if switch
    ]


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tree", nargs="+", choices=TREES, default=["bert-base", "small"])
    parser.add_argument("--optimizer", nargs="+", choices=OPTIMIZERS, default=["lamb", "lans"])
    parser.add_argument("--turns", type=int, default=20, help="steps in one call")
    parser.add_argument("--rounds", type=int, default=10)
    add_output(parser, "switch_times")
    args = parser.parse_args()
    cells = [(tree, name) for tree in args.tree for name in args.optimizer]
    rows = [row for cell in tqdm(cells) for row in measure(*cell, args.turns, args.rounds)]
    report(rows, args.output / "switch_times.csv")


if __name__ == "__main__":
    main()
