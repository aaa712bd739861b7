"""How far the trust ratios of the layers of a stack drift apart while a network trains.

    python -m benchmarks.batch_size_curve.stack_ratios            # minutes on a CPU core
    python -m benchmarks.batch_size_curve.stack_ratios --report   # only the plot

The network of `deep_bert`, with LAMB and a norm for each layer, at the settings that its sweep
found best at its first batch size, and for far longer than that takes to the target. Writes
`stack_ratios.csv` with the ratios of all layers of all kernels, beside the trials, and a plot.
"""

import argparse
import csv
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter
import numpy as np

from benchmarks.batch_size_curve.bert import DEEP, Bert
from benchmarks.batch_size_curve.optimizers import OPTIMIZERS, warmed_up
from benchmarks.batch_size_curve.search import Settings
from benchmarks.batch_size_curve.sweep import cells_of, read
from benchmarks.batch_size_curve.training import training_step
from benchmarks.batch_size_curve.workloads import DEEP_BERT
from benchmarks.harness.results import RUNS, write_csv
import optax_largebatch as lb
from optax_largebatch.diagnostics.colours import OF_OPTIMIZERS

STEPS, SEEDS = 1000, (0, 1, 2)
OPTIMIZER = "lamb"
NAME = "stack_ratios"


class Spread(NamedTuple):
    """Of the layers of a kernel, at a step of a run."""

    parameter: str
    seed: int
    step: int
    ratios: tuple[float, ...]

    @property
    def times(self) -> float:
        """The largest ratio over the smallest."""
        return max(self.ratios) / min(self.ratios)


def kernels(ratios: dict[str, Any]) -> dict[str, Any]:
    """Of the stacks that are adapted, by a short name."""
    return {
        name.split("/")[1]: own
        for name, own in ratios.items()
        if name.startswith("layers/") and name.endswith("/kernel")
    }


def run(task: Bert, settings: Settings, batch_size: int, seed: int, steps: int) -> list[Spread]:
    """The ratios at some twelve steps of every tenfold."""

    @jax.jit
    def train() -> Any:
        for_params, for_stream = jax.random.split(jax.random.key(seed))
        params = task.init(for_params)
        transformation = OPTIMIZERS[OPTIMIZER].build(
            warmed_up(jnp.asarray(settings.learning_rate), task.warmup_steps),
            jnp.asarray(settings.weight_decay),
            task.stacked,
        )
        train_step = training_step(task, transformation, task.stream(for_stream), batch_size)

        def recorded(carry: Any, step: jax.Array) -> Any:
            params, state = train_step(step, carry)
            ratios = lb.trust_ratios(transformation, state, params)
            return (params, state), kernels(ratios)

        start = (params, transformation.init(params))
        return jax.lax.scan(recorded, start, jnp.arange(steps))[1]

    noted = np.unique(np.geomspace(1, steps, int(12 * np.log10(steps)) + 1).round().astype(int))
    return [
        Spread(name, seed, int(step), tuple(float(f"{own:.5g}") for own in ratios[step - 1]))
        for name, ratios in jax.tree.map(np.asarray, train()).items()
        for step in noted
    ]


def write(rows: list[Spread], path: Path) -> None:
    """One line for each kernel, seed and step."""
    lines = [
        {"parameter": own.parameter, "seed": own.seed, "step": own.step}
        | {f"layer_{index}": ratio for index, ratio in enumerate(own.ratios)}
        for own in rows
    ]
    write_csv(lines, path)


def read_spreads(path: Path) -> list[Spread]:
    """The table."""
    with path.open() as file:
        return [
            Spread(
                line["parameter"],
                int(line["seed"]),
                int(line["step"]),
                tuple(float(own) for name, own in line.items() if name.startswith("layer_")),
            )
            for line in csv.DictReader(file)
        ]


def spread_table(rows: list[Spread]) -> str:
    """The largest ratio of a stack over its smallest: the median of all stacks, and the largest."""
    steps = sorted({own.step for own in rows})
    noted = [min(steps, key=lambda own: abs(own - mark)) for mark in (1, 10, 40, 80, 150, 300)]
    noted.append(steps[-1])
    times = {step: [own.times for own in rows if own.step == step] for step in noted}
    lines = [
        f"| step | {' | '.join(map(str, times))} |",
        "|---|" + "---|" * len(times),
        f"| median | {' | '.join(f'{np.median(own):.1f}' for own in times.values())} |",
        f"| largest | {' | '.join(f'{max(own):.1f}' for own in times.values())} |",
    ]
    return "\n".join(lines)


def plot(rows: list[Spread], path: Path) -> None:
    """The ratios of each layer in one run, and how far apart they are in all."""
    names = list(dict.fromkeys(own.parameter for own in rows))
    first, most = rows[0].seed, max(own.times for own in rows)
    figure, axes = plt.subplots(
        *(len(names), 2), figsize=(5.6, 1.5 * len(names)), sharex=True, layout="constrained"
    )
    for name, (left, right) in zip(names, axes, strict=True):
        own = [row for row in rows if row.parameter == name]
        steps = [row.step for row in own if row.seed == first]
        layers = np.array([row.ratios for row in own if row.seed == first]).T
        colours = plt.get_cmap("viridis")(np.linspace(0, 0.9, len(layers)))
        for layer, colour in zip(layers, colours, strict=True):
            left.plot(steps, layer, lw=1.2, color=colour)
        for seed in dict.fromkeys(row.seed for row in own):
            times = [row.times for row in own if row.seed == seed]
            right.plot(steps, times, lw=1.2, color=OF_OPTIMIZERS[OPTIMIZER], alpha=0.7)
        left.set(xscale="log", yscale="log")
        left.set_ylabel(name, fontweight="bold")
        right.set(xscale="log", yscale="log", ylim=(1, 1.1 * most))
    for own in axes.flat:
        own.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        own.yaxis.set_major_formatter("{x:g}")
        own.yaxis.set_minor_formatter(NullFormatter())
        own.grid(color="#e5e5e5")
        own.spines[["top", "right"]].set_visible(False)
    for own, title in zip(axes[0], ("trust ratio, one seed", "largest / smallest"), strict=True):
        own.set_title(title, loc="left", fontsize=10)
    axes[-1, 0].set(xlabel="step")
    axes[-1, 1].set(xlabel="step")
    first, *_, last = axes[0, 0].lines
    ends = [first, last], ["first layer", "last layer"]
    figure.legend(*ends, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=200)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    """Runs all seeds, and writes table and plot."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=RUNS / "batch_size_curve")
    parser.add_argument("--report", action="store_true", help="run nothing, write the plot")
    args = parser.parse_args(arguments)
    if not args.report:
        batch_size = DEEP_BERT.batch_sizes[0]
        cell = cells_of(DEEP_BERT, read(args.output / "trials.csv"))[OPTIMIZER, batch_size]
        if cell.best is None:
            parser.error(f"run the sweep of {DEEP_BERT.name} first, into the same --output.")
        task = Bert(DEEP_BERT.target, DEEP)
        rows = [row for seed in SEEDS for row in run(task, cell.best, batch_size, seed, STEPS)]
        write(rows, args.output / f"{NAME}.csv")
    plot(read_spreads(args.output / f"{NAME}.csv"), args.output / f"{NAME}.png")


if __name__ == "__main__":
    main()
