"""The pictures of the report; an optimizer has the same colour in all of them."""

from collections.abc import Mapping
import math
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
import numpy as np
from scipy.optimize import isotonic_regression

from benchmarks.harness.colours import INK, colours_of
from benchmarks.tuned.results import Curve, Results
from benchmarks.tuned.workloads import Workload

WIDTH = 5.6
LINE_OF_TEXT = 0.038  # as a share of the height of the axes
SPACING = 1.16  # from one optimizer to the next at a batch size, as a factor
HIGHEST = 0.5  # above the worst of the chosen settings; what is worse is beyond the upper edge


def plot_losses(workload: Workload, results: Results, path: Path) -> None:
    """The test loss at each batch size: a bar for the mean, and a dot for each seed.

    No line joins batch sizes, whose runs have other numbers of steps and examples.
    """
    figure, axes = plt.subplots(figsize=(WIDTH, 4.2), layout="constrained")
    colours = colours_of(workload.optimizers)
    ends = {}
    for place, (name, own) in enumerate(results.items()):
        sizes = [size for size in workload.plans if size in own and math.isfinite(own[size].mean)]
        if not sizes:
            continue
        x = np.array([float(batches) for batches in sizes]) * SPACING ** (place - len(results) // 2)
        means = [own[batches].mean for batches in sizes]
        axes.plot(x, means, "_", ms=10, mew=2, color=colours[name])
        for size, batches in zip(x, sizes, strict=True):
            losses = list(own[batches].losses.values())
            axes.plot([size] * len(losses), losses, "o", ms=2.5, alpha=0.6, color=colours[name])
        ends[name] = (x[-1], means[-1])
    axes.set(xscale="log", xlabel="batch size", ylabel="test loss at the end (lower is better)")
    axes.set_xticks([float(batches) for batches in workload.plans], list(workload.plans))
    _finish(axes, workload.title)
    name_ends(axes, ends, colours)
    figure.savefig(path)
    plt.close(figure)


def name_ends(
    axes: Axes, ends: Mapping[str, tuple[float, float]], colours: Mapping[str, str]
) -> None:
    """The name of each curve to the right of its end, no two closer than a line of text."""
    names = sorted(ends, key=lambda name: ends[name][1])
    to_share = axes.transScale + axes.transLimits  # of the height of the axes
    wished = np.array([to_share.transform(ends[name])[1] for name in names])
    lines = LINE_OF_TEXT * np.arange(len(names))
    heights = isotonic_regression(wished - lines).x.clip(0, 1 - lines[-1]) + lines
    for name, height in zip(names, heights, strict=True):
        axes.annotate(
            name,
            xy=ends[name],
            xytext=(1.06, height),
            textcoords="axes fraction",
            fontsize=8,
            va="center",
            color=colours[name],
            fontweight="bold",
            arrowprops={"arrowstyle": "-", "color": colours[name], "lw": 0.5, "relpos": (0, 0.5)},
        )


def plot_curves(
    title: str,
    rates: Mapping[str, Curve],
    decays: Mapping[str, Curve],
    colours: Mapping[str, str],
    path: Path,
) -> None:
    """How far one may be wrong: the loss over the rate, and over the decay.

    Rates are in units of the chosen one, which has a larger dot; without decay is at the left.
    """
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(WIDTH * 0.85, 6.4), sharey=True, layout="constrained"
    )
    for name, own in rates.items():
        x = np.array(list(own.losses)) / own.chosen
        _curve(above, name, colours[name], x, own, 1.0)
    off = min((value for own in decays.values() for value in own.losses if value), default=1) / 4
    for name, own in decays.items():
        x = np.maximum(list(own.losses), off)
        _curve(below, name, colours[name], x, own, max(own.chosen, off))
    above.set(xscale="log", xlabel="learning rate, in units of the chosen one", ylabel="test loss")
    above.set_xticks([0.25, 0.5, 1, 2, 4], ["1/4", "1/2", "1", "2", "4"])
    below.set(xscale="log", xlabel="weight decay", ylabel="test loss")
    below.set_xticks([off, 0.01, 0.1, 1], ["off", "0.01", "0.1", "1"])
    chosen = [own.losses[own.chosen] for own in rates.values()]
    least = min(min(own.losses.values()) for own in (*rates.values(), *decays.values()))
    if math.isfinite(max(chosen)):
        above.set_ylim(least - 0.05, max(chosen) + HIGHEST)
    _finish(above, title)
    _finish(below, "")
    figure.legend(
        *above.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=5,
        fontsize=8,
        frameon=False,
    )
    figure.savefig(path)
    plt.close(figure)


def _curve(axes: Axes, name: str, colour: str, x: np.ndarray, own: Curve, chosen: float) -> None:
    axes.plot(x, list(own.losses.values()), "o-", ms=3, lw=1.5, color=colour, label=name)
    axes.plot(chosen, own.losses[own.chosen], "o", ms=7, color=colour)


def _finish(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.minorticks_off()
    axes.grid(color=INK, alpha=0.2)
