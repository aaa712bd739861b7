"""The milliseconds of a step on the device: many steps inside one compiled program.

    python -m benchmarks.device_time                                  # on a GPU: BERT-base
    python -m benchmarks.device_time --tree tiny --turns 20 --rounds 2      # that it works

Call by call a step pays the host, which handles 800 arrays and launches each kernel before the
first one runs. In training all that happens while the device still works on the gradients. Here
`jax.lax.fori_loop` takes so many steps in one program, and twice as many in another. The seconds of
a call are divided by its steps, and nothing is subtracted: the two numbers agree if the call costs
nothing. Optimizers run one after the other, each with `optax.adamw` beside it in turns.

`of_floor` is the time over that of the bytes that the step cannot do without, at the bandwidth that
a copy of the largest array reaches. The products of Muon are not in it. Writes `device_time.csv`.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from benchmarks.harness.machine import machine
from benchmarks.harness.optimizers import BASELINE, OPTIMIZERS, made_for
from benchmarks.harness.results import add_output, report, write_csv
from benchmarks.harness.steps import Running, in_a_loop, start, step_of
from benchmarks.harness.trees import TREES
from benchmarks.harness.turns import in_turns, ratio

DEFAULT = ("lamb", "lans", "lars", "adamh", "muon", "muon, bfloat16", "muonh, bfloat16")


def prepare(tree: str, name: str, turns: int) -> Running:
    """An optimizer, ready to take so many steps at a call."""
    optimizer = made_for(name, TREES[tree])
    params, gradients = TREES[tree].arrays(), TREES[tree].arrays()
    state = jax.jit(optimizer.init)(params)
    return start(in_a_loop(step_of(optimizer), turns), params, state, gradients)


def seconds_of_a_copy(elements: int, turns: int, rounds: int) -> float:
    """The seconds in which an array of float32 is read and written once."""

    def step(array: Any, state: Any, given: Any) -> tuple[Any, Any]:
        return array + given, state

    ones = jnp.ones(elements, jnp.float32)
    running = start(in_a_loop(step, turns), ones, (), jnp.float32(1))
    return float(np.median(in_turns({"copy": running}, rounds)["copy"])) / turns


def measure(tree: str, name: str, turns: int, rounds: int) -> dict[str, Any]:
    """The row of an optimizer, which has the device to itself but for the baseline."""
    contenders = {
        "baseline": prepare(tree, BASELINE, turns),
        "once": prepare(tree, name, turns),
        "twice": prepare(tree, name, 2 * turns),
    }
    seconds = in_turns(contenders, rounds)
    elements = contenders["once"].parameters
    of_a_copy = seconds_of_a_copy(elements, turns, rounds)
    floor = of_a_copy * OPTIMIZERS[name].floor / 8
    step = float(np.median(seconds["twice"])) / (2 * turns)
    return {
        "tree": tree,
        "optimizer": name,
        "milliseconds": round(1e3 * step, 3),
        "milliseconds_of_half_the_turns": round(1e3 * float(np.median(seconds["once"])) / turns, 3),
        **ratio(seconds["once"], seconds["baseline"]).as_row(2),
        "of_floor": round(step / floor, 2),
        "turns": turns,
        "rounds": rounds,
        "machine": machine(),
    }


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tree", nargs="+", choices=TREES, default=["bert-base"])
    parser.add_argument("--optimizer", nargs="+", choices=OPTIMIZERS, default=[BASELINE, *DEFAULT])
    parser.add_argument("--turns", type=int, default=100, help="steps in one call")
    parser.add_argument("--rounds", type=int, default=5)
    add_output(parser, "device_time")
    args = parser.parse_args()
    cells = [(tree, name) for tree in args.tree for name in args.optimizer]
    rows = []
    for cell in tqdm(cells):
        rows.append(measure(*cell, args.turns, args.rounds))
        write_csv(rows, args.output / "device_time.csv")
    report(rows, args.output / "device_time.csv")


if __name__ == "__main__":
    main()
