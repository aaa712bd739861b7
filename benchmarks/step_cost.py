"""The cost of a step: time and memory of each optimizer, beside `optax.adamw` in the same run.

    python -m benchmarks.step_cost                       # BERT-base and many small leaves
    python -m benchmarks.step_cost --tree "bert-base, stacked" "bert-base, bfloat16"
    python -m benchmarks.step_cost --tree bert-base --rounds 50 --output benchmarks/results
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
import dataclasses
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
from benchmarks.harness.optimizers import BASELINE, OPTIMIZERS, made_for
from benchmarks.harness.results import add_output, write_csv
from benchmarks.harness.steps import Running, start, start_update
from benchmarks.harness.torch_peers import PEERS, RunningPeer, running_peer
from benchmarks.harness.trees import TREES
from benchmarks.harness.turns import in_turns, ratio

COLOURED = {BASELINE: COLOURS["adamw"]} | {name: COLOURS[name] for name in ("lamb", "lans", "lars")}
"""The others are grey."""


@dataclasses.dataclass
class Measurement:
    """One optimizer on one tree; `bytes` are those that XLA counts in the compiled step."""

    tree: str
    optimizer: str
    parameters: int
    leaves: int
    trace_s: float | None = None
    compile_s: float | None = None
    temporaries_bytes: int | None = None
    bytes_per_parameter: float | None = None
    times_floor: float = 1.0
    ratio: float = 1.0
    ratio_low: float = 1.0
    ratio_high: float = 1.0
    seconds: float = 0.0

    def take(self, seconds: np.ndarray, baseline: np.ndarray) -> None:
        """Notes the times of the steps, and those of the baseline in the same turns."""
        over_baseline = ratio(seconds, baseline)
        self.seconds = float(np.median(seconds))
        floor = (OPTIMIZERS | PEERS)[self.optimizer].floor / OPTIMIZERS[BASELINE].floor
        self.times_floor = round(over_baseline.median / floor, 2)
        for name, value in over_baseline.columns(2).items():
            setattr(self, name, value)

    def row(self) -> dict[str, Any]:
        """The line of the table of ratios."""
        own = dataclasses.asdict(self) | {"machine": machine()}
        del own["seconds"]
        return own

    def bandwidth(self, of_a_copy: float) -> dict[str, Any]:
        """The line of the table of bandwidths."""
        moved = (OPTIMIZERS | PEERS)[self.optimizer].floor * self.parameters / self.seconds
        return {
            "tree": self.tree,
            "optimizer": self.optimizer,
            "milliseconds": round(1e3 * self.seconds, 3),
            "gigabytes_per_second": round(moved / 1e9, 1),
            "of_a_copy": round(moved / of_a_copy, 3),
            "copy_gigabytes_per_second": round(of_a_copy / 1e9, 1),
            "machine": machine(),
        }


def prepare(tree: str, name: str, gradients: Any) -> tuple[Measurement, Running]:
    """Compiles a step and measures what can be measured without running it."""
    network = TREES[tree]
    running = start_update(made_for(name, network), network.arrays(), gradients)
    measurement = Measurement(
        tree=tree,
        optimizer=name,
        parameters=running.parameters,
        leaves=len(jax.tree.leaves(running.params)),
        trace_s=round(running.trace_s, 2),
        compile_s=round(running.compile_s, 2),
        temporaries_bytes=running.temporaries_bytes,
        bytes_per_parameter=round(running.bytes_accessed / running.parameters, 1),
    )
    return measurement, running


def prepare_peer(tree: str, name: str, gradients: Any) -> tuple[Measurement, RunningPeer]:
    """An optimizer of PyTorch, of which only the time of a step is measured."""
    params = TREES[tree].arrays()
    leaves = jax.tree.leaves(params)
    measurement = Measurement(tree, name, sum(leaf.size for leaf in leaves), len(leaves))
    return measurement, running_peer(PEERS[name], params, gradients)


def compare(tree: str, name: str, gradients: Any, baseline: Running, rounds: int) -> Measurement:
    """An optimizer in turns with the baseline; its memory is free again afterwards."""
    measurement, running = (prepare_peer if name in PEERS else prepare)(tree, name, gradients)
    seconds = in_turns({BASELINE: baseline, name: running}, rounds)
    measurement.take(seconds[name], seconds[BASELINE])
    return measurement


def bandwidth_of_a_copy(elements: int, rounds: int) -> float:
    """The bytes that reading and writing an array in place moves in a second."""

    def step(array: Any, state: Any, given: Any) -> tuple[Any, Any]:
        return array + 1, state

    running = start(step, jnp.zeros(elements, "float32"), (), ())
    return 8 * elements / float(np.median(in_turns({"copy": running}, rounds)["copy"]))


def measure(tree: str, names: list[str], rounds: int) -> list[Measurement]:
    """All optimizers on one tree, one after the other."""
    gradients = TREES[tree].arrays()
    measurement, baseline = prepare(tree, BASELINE, gradients)
    alone = in_turns({BASELINE: baseline}, rounds)[BASELINE]
    measurement.take(alone, alone)
    others = tqdm([name for name in names if name != BASELINE], desc=tree)
    return [measurement, *(compare(tree, name, gradients, baseline, rounds) for name in others)]


def table(measurements: list[Measurement]) -> str:
    """The measurements as text."""
    head = (
        f"{'tree':<20} {'optimizer':<22} {'x adamw':>8} {'10%..90%':>13} {'x floor':>8} "
        f"{'temporaries':>12} "
        f"{'bytes/param':>12} {'trace s':>8} {'compile s':>10}"
    )
    lines = [
        f"{m.tree:<20} {m.optimizer:<22} {m.ratio:>8.2f} {m.ratio_low:>6.2f}..{m.ratio_high:<5.2f} "
        f"{m.times_floor:>8.2f} "
        + (
            f"{m.temporaries_bytes / 1e6:>9.1f} MB {m.bytes_per_parameter:>12.1f} "
            f"{m.trace_s:>8.2f} {m.compile_s:>10.2f}"
            if m.temporaries_bytes is not None
            else ""
        )
        for m in measurements
    ]
    return "\n".join([head, *lines])


def plot(measurements: list[Measurement], path: Path) -> None:
    """A panel for each tree, one below the other, so that a telephone shows them in full."""
    trees = list(dict.fromkeys(m.tree for m in measurements))
    counts = [sum(m.tree == tree for m in measurements) for tree in trees]
    figure, axes = plt.subplots(
        len(trees),
        1,
        figsize=(4.2, 0.9 * len(trees) + 0.19 * sum(counts)),
        height_ratios=counts,
        squeeze=False,
        layout="constrained",
    )
    for axis, tree in zip(axes[:, 0], trees, strict=True):
        own = sorted((m for m in measurements if m.tree == tree), key=lambda m: m.ratio)
        names = [m.optimizer for m in own]
        ratios = np.array([m.ratio for m in own])
        spread = [ratios - [m.ratio_low for m in own], [m.ratio_high for m in own] - ratios]
        colours = [COLOURED.get(name, GREY) for name in names]
        axis.barh(names, ratios, xerr=np.abs(spread), color=colours, error_kw={"lw": 1})
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
    parser.add_argument("--optimizer", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
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
    measurements = [m for tree in args.tree for m in measure(tree, names, args.rounds)]
    write_csv([own.row() for own in measurements], args.output / "step_cost.csv")
    if args.bandwidth:
        of_a_copy = bandwidth_of_a_copy(max(own.parameters for own in measurements), args.rounds)
        rows = [own.bandwidth(of_a_copy) for own in measurements]
        write_csv(rows, args.output / "bandwidth.csv")
    plot(measurements, args.output / "step_cost.png")
    print(f"{machine()}\n{table(measurements)}")


if __name__ == "__main__":
    main()
