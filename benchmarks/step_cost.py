"""The cost of a step: time and memory of each optimizer, beside `optax.adamw` in the same run.

    python -m benchmarks.step_cost                       # BERT-base and many small leaves
    python -m benchmarks.step_cost --tree "bert-base, stacked" "bert-base, bfloat16"
    python -m benchmarks.step_cost --tree bert-base --rounds 50 --output benchmarks/results
    python -m benchmarks.step_cost --optimizer muon muonh --rounds 3       # only if named
    python -m benchmarks.step_cost --peers               # with PyTorch's, where they are installed
    python -m benchmarks.step_cost --bandwidth           # of a float32 tree, beside that of a copy

Each optimizer takes its steps in turns with `optax.adamw`, and the two are compared turn by turn. A
shared machine is slow at one time and fast at another, so only the ratios are meaningful. Only one
optimizer at a time is in memory, or those with large temporaries would slow down the others.
Parameters and state are donated, as in training. `x floor` is the ratio over that of the bytes that
the step cannot do without: every pass that a norm forces reads its arrays from memory again. Writes
`step_cost.csv`, one line for each optimizer and tree, and `step_cost.png`. With `--bandwidth` a
second table, `bandwidth.csv`, has milliseconds and the bytes of the floor for each second, beside
those that an array's copy reads and writes: only where nothing else runs do these mean something.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
import numpy as np
from tqdm import tqdm

from benchmarks.harness.colours import COLOURS, GREY
from benchmarks.harness.machine import machine
from benchmarks.harness.optimizers import BASELINE, MULTIPLYING, OPTIMIZERS, made_for
from benchmarks.harness.results import add_output, report
from benchmarks.harness.steps import Running, start, start_update
from benchmarks.harness.torch_peers import PEERS, RunningPeer, running_peer
from benchmarks.harness.trees import TREES
from benchmarks.harness.turns import in_turns, ratio

COLOURED = {BASELINE: COLOURS["adamw"]} | {name: COLOURS[name] for name in ("lamb", "lans", "lars")}
"""The others are grey."""
FLOORS = {name: optimizer.floor for name, optimizer in (OPTIMIZERS | PEERS).items()}


def prepare(tree: str, name: str, gradients: Any) -> Running | RunningPeer:
    """An optimizer, ready to take steps."""
    network = TREES[tree]
    if name in PEERS:
        return running_peer(PEERS[name], network.arrays(), gradients)
    return start_update(made_for(name, network), network.arrays(), gradients)


def compare(
    tree: str, name: str, gradients: Any, baseline: Running, rounds: int
) -> tuple[dict[str, Any], float]:
    """A row and the seconds of a step; the optimizer's memory is free again afterwards."""
    running = baseline if name == BASELINE else prepare(tree, name, gradients)
    seconds = in_turns({BASELINE: baseline, name: running}, rounds)
    row = {
        "tree": tree,
        "optimizer": name,
        "parameters": baseline.parameters,
        "leaves": len(jax.tree.leaves(gradients)),
        "trace_s": None,
        "compile_s": None,
        "temporaries_bytes": None,
        "bytes_per_parameter": None,
    }
    if isinstance(running, Running):
        row |= {
            "trace_s": round(running.trace_s, 2),
            "compile_s": round(running.compile_s, 2),
            "temporaries_bytes": running.temporaries_bytes,
            "bytes_per_parameter": round(running.bytes_accessed / running.parameters, 1),
        }
    of_baseline = ratio(seconds[name], seconds[BASELINE])
    times_floor = of_baseline.median * FLOORS[BASELINE] / FLOORS[name]
    row |= {"times_floor": round(times_floor, 2)} | of_baseline.as_row(2) | {"machine": machine()}
    return row, float(np.median(seconds[name]))


def measure(tree: str, names: list[str], rounds: int) -> list[tuple[dict[str, Any], float]]:
    """All optimizers on one tree, one after the other."""
    gradients = TREES[tree].arrays()
    baseline = prepare(tree, BASELINE, gradients)
    return [compare(tree, name, gradients, baseline, rounds) for name in tqdm(names, desc=tree)]


def bandwidths(
    measured: list[tuple[dict[str, Any], float]], rounds: int
) -> Iterator[dict[str, Any]]:
    """The bytes that each step moves in a second, beside those of a copy in place."""

    def step(array: Any, state: Any, given: Any) -> tuple[Any, Any]:
        return array + 1, state

    elements = max(row["parameters"] for row, _ in measured)
    running = start(step, jnp.zeros(elements, "float32"), (), ())
    copy = 8 * elements / float(np.median(in_turns({"copy": running}, rounds)["copy"]))
    for row, seconds in measured:
        moved = FLOORS[row["optimizer"]] * row["parameters"] / seconds
        yield {
            "tree": row["tree"],
            "optimizer": row["optimizer"],
            "milliseconds": round(1e3 * seconds, 3),
            "gigabytes_per_second": round(moved / 1e9, 1),
            "of_a_copy": round(moved / copy, 3),
            "copy_gigabytes_per_second": round(copy / 1e9, 1),
            "machine": machine(),
        }


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """A panel for each tree, one below the other, so that a telephone shows them in full."""
    trees = list(dict.fromkeys(row["tree"] for row in rows))
    counts = [sum(row["tree"] == tree for row in rows) for tree in trees]
    figure, axes = plt.subplots(
        len(trees),
        1,
        figsize=(4.2, 0.9 * len(trees) + 0.19 * sum(counts)),
        height_ratios=counts,
        squeeze=False,
        layout="constrained",
    )
    for axis, tree in zip(axes[:, 0], trees, strict=True):
        bars = sorted((row for row in rows if row["tree"] == tree), key=lambda row: row["ratio"])
        names = [row["optimizer"] for row in bars]
        low, ratios, high = np.array(
            [[row["ratio_low"], row["ratio"], row["ratio_high"]] for row in bars]
        ).T
        spread = np.abs([ratios - low, high - ratios])
        colours = [COLOURED.get(name, GREY) for name in names]
        axis.barh(names, ratios, xerr=spread, color=colours, error_kw={"lw": 1})
        axis.axvline(1, color="black", lw=0.8)
        axis.set_title(tree, loc="left", fontsize=10, fontweight="bold")
        axis.tick_params(axis="y", length=0)
        axis.spines[["top", "right"]].set_visible(False)
        axis.invert_yaxis()
    axes[-1, 0].set(xlabel="time of a step, x optax.adamw")
    figure.savefig(path, dpi=200)


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tree", nargs="+", choices=TREES, default=["bert-base", "small"])
    usual = [name for name in OPTIMIZERS if name not in MULTIPLYING]
    parser.add_argument("--optimizer", nargs="+", choices=OPTIMIZERS, default=usual)
    parser.add_argument(
        "--peers", action="store_true", help="also those of PyTorch that are installed"
    )
    parser.add_argument("--bandwidth", action="store_true", help="also the bytes of each second")
    parser.add_argument("--rounds", type=int, default=20, help="steps of each optimizer")
    add_output(parser, "step_cost")
    args = parser.parse_args()
    names = [BASELINE, *(name for name in args.optimizer if name != BASELINE)]
    if args.peers:
        names += [name for name, peer in PEERS.items() if peer.is_installed]
    measured = [pair for tree in args.tree for pair in measure(tree, names, args.rounds)]
    rows = [row for row, _ in measured]
    report(rows, args.output / "step_cost.csv")
    if args.bandwidth:
        report(list(bandwidths(measured, args.rounds)), args.output / "bandwidth.csv")
    plot(rows, args.output / "step_cost.png")


if __name__ == "__main__":
    main()
