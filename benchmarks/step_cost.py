"""What a step costs: time and memory of each optimizer, beside `optax.adamw` in the same run.

    python benchmarks/step_cost.py                       # BERT-base and many small leaves
    python benchmarks/step_cost.py --tree "bert-base, stacked" "bert-base, bfloat16"
    python benchmarks/step_cost.py --tree bert-base --rounds 50 --output benchmarks/results
    python benchmarks/step_cost.py --peers               # with PyTorch's, where they are installed

Each optimizer takes its steps in turns with `optax.adamw`, and they are compared turn by turn,
because a shared machine is slow at one time and fast at another: only the ratios mean something.
One optimizer at a time is in memory, or those with large temporaries would slow down the others.
Parameters and state are donated, as in training. `x floor` is the ratio over that of the bytes that
the step cannot do without: every pass that a norm forces reads its arrays from memory again. Writes
`step_cost.csv`, one line for each optimizer and tree, and `step_cost.png`.
"""

import argparse
from collections.abc import Callable
import csv
import dataclasses
import functools
from pathlib import Path
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
from machine import machine
from matplotlib import pyplot as plt
import numpy as np
import optax
from torch_peers import PEERS, RunningPeer, running_peer
from tqdm import tqdm

import optax_largebatch as lb


class Contender(NamedTuple):
    """An optimizer and what it has to move."""

    make: Callable[..., optax.GradientTransformation]
    """Takes `stacked`, if it is one of ours."""
    floor: int
    """Bytes for each float32 parameter, read and written, if no pass could use a cache."""


# AdamW reads p, g, m, v and writes p, m, v: 28. A norm of p or g before that is 4 more, and norms
# between the moments and the step have p, m and v read again.
OPTIMIZERS = {
    "optax.adamw": Contender(lambda: optax.adamw(1e-3, weight_decay=0.01), 28),
    "optax.lamb": Contender(lambda: optax.lamb(1e-3, weight_decay=0.01), 40),
    "optax.lars": Contender(lambda: optax.lars(1e-3, weight_decay=0.01), 28),
    "lamb": Contender(functools.partial(lb.lamb, 1e-3, weight_decay=0.01), 40),
    "lans": Contender(functools.partial(lb.lans, 1e-3, weight_decay=0.01), 48),
    "lars": Contender(functools.partial(lb.lars, 1e-3, weight_decay=0.01), 28),
    "larc": Contender(functools.partial(lb.larc, 1e-3, weight_decay=0.01), 28),
    "lbsgd": Contender(
        functools.partial(lb.lbsgd, 1e-3, 0.9, weight_decay=0.01, warmup_strategy="lars"), 28
    ),
    "eve": Contender(functools.partial(lb.eve, 1e-3), 32),
    "cain": Contender(functools.partial(lb.cain, 1e-3), 40),
    "scaled_adam": Contender(functools.partial(lb.scaled_adam, 1e-3), 36),
}
BASELINE = "optax.adamw"


def bert(layers: int, width: int, vocabulary: int = 30522) -> dict[str, Any]:
    """The shapes of a BERT encoder; 12 layers of 768 make BERT-base, 24 of 1024 BERT-large."""

    def dense(rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        return {"kernel": (rows, columns), "bias": (columns,)}

    norm = {"scale": (width,), "bias": (width,)}
    layer = {
        **{name: dense(width, width) for name in ("query", "key", "value", "output")},
        "up": dense(width, 4 * width),
        "down": dense(4 * width, width),
        "attention_norm": norm,
        "output_norm": norm,
    }
    return {
        "embeddings": {"word": (vocabulary, width), "position": (512, width), "type": (2, width)},
        "embeddings_norm": norm,
        **{f"layer_{index}": layer for index in range(layers)},
        "pooler": dense(width, width),
        "head": {**dense(width, width), "norm": norm, "output_bias": (vocabulary,)},
    }


def stacked_bert(layers: int, width: int) -> dict[str, Any]:
    """The same network as `flax.linen.scan` holds it: all layers in the arrays of one."""
    shapes = bert(layers, width)
    layer = shapes["layer_0"]
    rest = {name: own for name, own in shapes.items() if not name.startswith("layer_")}
    stack = jax.tree.map(lambda shape: (layers, *shape), layer, is_leaf=is_shape)
    return {**rest, "layers": stack}


def is_shape(node: Any) -> bool:
    """Whether a node of a tree of shapes is a shape."""
    return isinstance(node, tuple)


def small_leaves(count: int = 300, distinct: int = 20) -> dict[str, tuple[int, ...]]:
    """Leaves of a thousand to a hundred thousand elements, of so many distinct shapes."""
    sizes = np.geomspace(1e3, 1e5, distinct).astype(int)
    return {f"leaf_{index}": (int(sizes[index % distinct]),) for index in range(count)}


class Tree(NamedTuple):
    """The parameters of a network."""

    shapes: Callable[[], dict[str, Any]]
    dtype: str = "float32"
    stacked: lb.Stacked | None = None


TREES = {
    "bert-base": Tree(lambda: bert(12, 768)),
    "bert-base, bfloat16": Tree(lambda: bert(12, 768), "bfloat16"),
    "bert-base, stacked": Tree(
        lambda: stacked_bert(12, 768), stacked=lb.stacked_layers({"^layers/": 0})
    ),
    "bert-large": Tree(lambda: bert(24, 1024)),
    "small": Tree(small_leaves),
    "1000 leaves": Tree(lambda: small_leaves(1000)),
}


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


@dataclasses.dataclass
class Running:
    """A compiled step and what it works on."""

    step: Any
    params: Any
    state: Any
    gradients: Any
    seconds: list[float] = dataclasses.field(default_factory=list)

    def run(self) -> None:
        """Takes a step and notes how long it took."""
        start = time.perf_counter()
        self.params, self.state = self.step(self.params, self.state, self.gradients)
        jax.block_until_ready((self.params, self.state))
        self.seconds.append(time.perf_counter() - start)


def arrays(shapes: Any, dtype: str = "float32") -> Any:
    """Normal numbers of the size of weights, the same for the same shapes."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda shape: jnp.asarray(0.02 * rng.standard_normal(shape, "float32"), dtype),
        shapes,
        is_leaf=is_shape,
    )


def prepare(tree: str, name: str, gradients: Any) -> tuple[Measurement, Running]:
    """Compiles a step and measures what can be measured without running it."""
    contender, network = OPTIMIZERS[name], TREES[tree]
    ours = "." not in name
    optimizer = contender.make(**({"stacked": network.stacked} if ours else {}))

    def step(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    params = arrays(network.shapes(), network.dtype)
    state = jax.jit(optimizer.init)(params)
    start = time.perf_counter()
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, gradients)
    traced = time.perf_counter()
    compiled = lowered.compile()
    done = time.perf_counter()
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    measurement = Measurement(
        tree=tree,
        optimizer=name,
        parameters=count,
        leaves=len(jax.tree.leaves(params)),
        trace_s=round(traced - start, 2),
        compile_s=round(done - traced, 2),
        temporaries_bytes=compiled.memory_analysis().temp_size_in_bytes,
        bytes_per_parameter=round(compiled.cost_analysis()["bytes accessed"] / count, 1),
    )
    return measurement, Running(compiled, params, state, gradients)


def prepare_peer(tree: str, name: str, gradients: Any) -> tuple[Measurement, RunningPeer]:
    """An optimizer of PyTorch, of which only the time of a step is measured."""
    params = arrays(TREES[tree].shapes(), TREES[tree].dtype)
    leaves = jax.tree.leaves(params)
    measurement = Measurement(tree, name, sum(leaf.size for leaf in leaves), len(leaves))
    return measurement, running_peer(PEERS[name], params, gradients)


def measure(tree: str, names: list[str], rounds: int) -> list[Measurement]:
    """All optimizers on one tree, one after the other, each in turns with the baseline."""
    gradients = arrays(TREES[tree].shapes(), TREES[tree].dtype)
    measurement, baseline = prepare(tree, BASELINE, gradients)
    measurements = [measurement]
    for name in tqdm([name for name in names if name != BASELINE], desc=tree):
        measurement, running = (prepare_peer if name in PEERS else prepare)(tree, name, gradients)
        baseline.seconds.clear()
        for _ in range(rounds + 1):
            baseline.run()
            running.run()
        # The first step is left out: it touches its memory for the first time.
        ratios = np.divide(running.seconds[1:], baseline.seconds[1:])
        low, median, high = np.quantile(ratios, (0.1, 0.5, 0.9))
        measurement.ratio, measurement.ratio_low = round(median, 2), round(low, 2)
        measurement.ratio_high = round(high, 2)
        floor = (OPTIMIZERS | PEERS)[name].floor / OPTIMIZERS[BASELINE].floor
        measurement.times_floor = round(median / floor, 2)
        measurements.append(measurement)
    return measurements


def write_csv(measurements: list[Measurement], path: Path) -> None:
    """One line for each measurement, with the machine and the versions."""
    rows = [
        dataclasses.asdict(measurement) | {"machine": machine()} for measurement in measurements
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


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
    """A bar for each optimizer, a panel for each tree."""
    trees = list(dict.fromkeys(m.tree for m in measurements))
    figure, axes = plt.subplots(
        1, len(trees), figsize=(1.5 + 4 * len(trees), 3.6), sharey=True, layout="constrained"
    )
    for axis, tree in zip(np.atleast_1d(axes), trees, strict=True):
        own = [m for m in measurements if m.tree == tree]
        names = [m.optimizer for m in own]
        ratios = np.array([m.ratio for m in own])
        spread = [ratios - [m.ratio_low for m in own], [m.ratio_high for m in own] - ratios]
        colours = ["#0072b2" if "." not in name else "#999999" for name in names]
        axis.barh(names, ratios, xerr=np.abs(spread), color=colours, error_kw={"lw": 1})
        axis.axvline(1, color="black", lw=0.8)
        axis.set(title=tree, xlabel="time of a step, x optax.adamw")
        axis.spines[["top", "right"]].set_visible(False)
    np.atleast_1d(axes)[0].invert_yaxis()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tree", nargs="+", choices=TREES, default=["bert-base", "small"])
    parser.add_argument("--optimizer", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument(
        "--peers", action="store_true", help="also those of PyTorch that are installed"
    )
    parser.add_argument("--rounds", type=int, default=20, help="steps of each optimizer")
    parser.add_argument("--output", type=Path, default=Path("runs/step_cost"))
    args = parser.parse_args()
    names = [BASELINE, *(name for name in args.optimizer if name != BASELINE)]
    if args.peers:
        names += [name for name, peer in PEERS.items() if peer.is_installed]
    measurements = [m for tree in args.tree for m in measure(tree, names, args.rounds)]
    args.output.mkdir(parents=True, exist_ok=True)
    write_csv(measurements, args.output / "step_cost.csv")
    plot(measurements, args.output / "step_cost.png")
    print(f"{machine()}\n{table(measurements)}")


if __name__ == "__main__":
    main()
