"""Tables, fits and plots, from the table of trials alone."""

from collections.abc import Iterable, Sequence
import math
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
import numpy as np
from scipy.optimize import isotonic_regression

from benchmarks.batch_size_curve.search import Settings, on_edge
from benchmarks.batch_size_curve.sweep import Row, cells_of, read
from benchmarks.batch_size_curve.workloads import Workload
import optax_largebatch as lb
from optax_largebatch.diagnostics.colours import GREY, OF_OPTIMIZERS

HIGHLIGHTED = ("adamw", "lamb", "lans", "muon", "sgd")  # the others are grey in every picture
LINE_OF_TEXT = 0.038  # as a share of the height of the axes


class Measured(NamedTuple):
    """An optimizer at a batch size."""

    runs: tuple[float, ...]
    """Steps to the target of the best settings, with each seed."""
    edge: bool
    """Whether the best settings have the smallest or the largest learning rate of the range."""
    settings: Settings | None
    test_losses: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median of the runs."""
        return float(np.quantile(self.runs, 0.5, method="inverted_cdf"))

    @property
    def reached(self) -> bool:
        """Whether every run reached the target."""
        return all(map(math.isfinite, self.runs))


def bootstrap_interval(
    runs: Sequence[float], resamples: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """The interval that holds 90% of the medians of runs drawn from these with replacement."""
    own = np.sort(runs)
    draws = np.random.default_rng(seed).integers(len(own), size=(resamples, len(own)))
    medians = own[np.sort(draws, axis=1)[:, (len(own) - 1) // 2]]
    low, high = np.quantile(medians, (0.05, 0.95), method="inverted_cdf")
    return float(low), float(high)


def measured(workload: Workload, rows: list[Row]) -> dict[str, dict[int, Measured]]:
    """The results of complete cells (with their whole budget), by optimizer and batch size."""
    results: dict[str, dict[int, Measured]] = {}
    for (optimizer, batch_size), cell in cells_of(workload, rows).items():
        if not cell.complete:
            continue
        if cell.best is None:
            own = Measured((math.inf,), edge=False, settings=None, test_losses=())
        else:
            own = Measured(
                tuple(row.outcome.steps for row in cell.repeats),
                on_edge(cell.best, cell.space),
                cell.best,
                tuple(row.test_loss for row in cell.repeats if row.ended == "reached"),
            )
        results.setdefault(optimizer, {})[batch_size] = own
    return results


def fit(cells: dict[int, Measured]) -> lb.CriticalBatchSize | str:
    """The fit to the batch sizes at which every run reached the target, or why there is none."""
    reached = {size: own.runs for size, own in cells.items() if own.reached}
    if len(reached) < 3:
        return "the target was reached at fewer than three batch sizes"
    try:
        return lb.fit_critical_batch_size(list(reached), list(reached.values()))
    except ValueError:
        return "the steps do not bend"


def steps_text(cell: Measured, fewest: float) -> str:
    """Median steps, their interval, and remarks."""
    if not math.isfinite(cell.median):
        return "never"
    text = f"**{cell.median:.4g}**" if cell.median == fewest else f"{cell.median:.4g}"
    if len(cell.runs) > 1:
        text += " ({:.4g} to {:.4g})".format(*bootstrap_interval(cell.runs))
    return text + "\\*" * cell.edge


def steps_column(results: dict[str, dict[int, Measured]], batch_size: int) -> dict[str, str]:
    """The steps of every complete optimizer at a batch size, the fewest in bold."""
    cells = {name: own[batch_size] for name, own in results.items() if batch_size in own}
    fewest = min((cell.median for cell in cells.values()), default=math.inf)
    return {name: steps_text(cell, fewest) for name, cell in cells.items()}


def steps_table(workload: Workload, results: dict[str, dict[int, Measured]]) -> str:
    """Median steps by optimizer and batch size."""
    columns = {size: steps_column(results, size) for size in workload.batch_sizes}
    columns = {size: column for size, column in columns.items() if column}
    lines = [f"| optimizer | {' | '.join(map(str, columns))} |", "|---|" + "---|" * len(columns)]
    for optimizer in results:
        texts = [column.get(optimizer, "") for column in columns.values()]
        lines.append(f"| `{optimizer}` | {' | '.join(texts)} |")
    return "\n".join(lines)


def fit_table(workload: Workload, results: dict[str, dict[int, Measured]]) -> str:
    """The fits, and the test loss where the target was reached."""
    lines = [
        "| optimizer | S_min | B_crit | 90% over the seeds | residual | test loss |",
        "|---|---|---|---|---|---|",
    ]
    for optimizer, cells in results.items():
        losses = [loss for own in cells.values() for loss in own.test_losses]
        test = f"{min(losses):.3f} to {max(losses):.3f}" if losses else ""
        found = fit(cells)
        if isinstance(found, str):
            lines.append(f"| `{optimizer}` | {found} | | | | {test} |")
            continue
        interval = "" if found.interval is None else "{:.0f} to {:.0f}".format(*found.interval)
        lines.append(
            f"| `{optimizer}` | {found.minimum_steps:.1f} | {found.critical_batch_size:.0f} "
            f"| {interval} | {found.residual:.1%} | {test} |"
        )
    for optimizer, (least, critical) in workload.exact(workload.target).items():
        lines.append(f"| `{optimizer}`, exact limits | {least:.1f} | {critical:.0f} | | | |")
    return "\n".join(lines)


def tables(workload: Workload, rows: list[Row]) -> str:
    """Both tables of a workload, in Markdown."""
    results = measured(workload, rows)
    if not results:
        return "Nothing is complete yet."
    if not workload.has_curve:
        return steps_table(workload, results)
    return f"{steps_table(workload, results)}\n\n{fit_table(workload, results)}"


def colours(names: Iterable[str]) -> dict[str, str]:
    """The colour of each curve: few have their own, the others are grey."""
    return {name: OF_OPTIMIZERS[name] if name in HIGHLIGHTED else GREY for name in names}


def plot(workload: Workload, rows: list[Row], path: Path) -> None:
    """Median steps against batch size; hollow where the best rate is at the edge of its range.

    Bars are drawn for what is in colour. One that leaves at the top is infinite: some runs did not
    reach the target.
    """
    results = measured(workload, rows)
    own_colours = colours(results)
    front = [name for name, colour in own_colours.items() if colour != GREY]
    figure, axes = plt.subplots(figsize=(5.6, 4.8), layout="constrained")
    every, ends = [], {}
    for optimizer, cells in results.items():
        kept = {size: own for size, own in cells.items() if math.isfinite(own.median)}
        if not kept:
            continue
        style = {"color": own_colours[optimizer], "zorder": 2 + (optimizer in front)}
        x, medians = np.array([(size, own.median) for size, own in kept.items()]).T
        width, dot = 0.8, 2.5
        if optimizer in front:
            width, dot = 1.5, 4.5
            x = x * 1.04 ** (front.index(optimizer) - (len(front) - 1) / 2)  # bars stand apart
            low, high = np.array([bootstrap_interval(own.runs) for own in kept.values()]).T
            axes.vlines(x, low, np.minimum(high, 1e9), lw=1, alpha=0.5, **style)
            every += [*low, *high[np.isfinite(high)]]
        axes.plot(x, medians, lw=width, marker="o", ms=dot, **style)
        edges = [own.edge for own in kept.values()]
        axes.plot(x[edges], medians[edges], "o", ms=dot, mfc="white", **style)
        every += [*medians]
        ends[optimizer] = (x[-1], medians[-1])
    low, high = min(every) * 0.85, max(every) * 1.15
    axes.set(xscale="log", yscale="log", ylim=(low, high))
    axes.set(xlabel="batch size", ylabel=workload.measured)
    axes.set_title(workload.title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xticks(workload.batch_sizes, [str(size) for size in workload.batch_sizes])
    marks = [digit * 10**power for power in range(7) for digit in (1, 2, 5)]
    marks = [mark for mark in marks if low < mark < high]
    axes.set_yticks(marks, [str(mark) for mark in marks])
    axes.minorticks_off()
    axes.grid(color="#eeeeee")
    axes.spines[["top", "right"]].set_visible(False)
    name_ends(axes, ends, own_colours)
    figure.savefig(path, dpi=200)
    plt.close(figure)


def name_ends(
    axes: Axes, ends: dict[str, tuple[float, float]], own_colours: dict[str, str]
) -> None:
    """The name of each curve to the right of its end, no two closer than a line of text.

    Those in grey have one name together.
    """
    grey = [name for name in ends if own_colours[name] == GREY]
    named = {name: end for name, end in ends.items() if name not in grey}
    if len(grey) == 1:
        named |= {grey[0]: ends[grey[0]]}
    elif grey:
        middle = sorted(grey, key=lambda name: ends[name][1])[len(grey) // 2]
        named[f"{len(grey)} others"] = ends[middle]
    names = sorted(named, key=lambda name: named[name][1])
    to_share = axes.transScale + axes.transLimits  # of the height of the axes
    wished = np.array([to_share.transform(named[name])[1] for name in names])
    steps = LINE_OF_TEXT * np.arange(len(names))
    places = isotonic_regression(wished - steps).x.clip(0, 1 - steps[-1]) + steps
    for name, place in zip(names, places, strict=True):
        colour = own_colours.get(name, GREY)
        axes.annotate(
            name,
            xy=named[name],
            xytext=(1.06, place),
            textcoords="axes fraction",
            fontsize=8,
            va="center",
            color="#6a6a6a" if colour == GREY else colour,
            fontweight="normal" if colour == GREY else "bold",
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.5, "relpos": (0, 0.5)},
        )


def _counted(count: int, what: str) -> str:
    """A number with its noun, as in `1 seed` or `3 seeds`."""
    return f"{count} {what}{'s' * (count > 1)}"


def write_report(output: Path, workloads: Sequence[Workload]) -> None:
    """`report.md` and a plot of each workload that has results."""
    rows = read(output / "trials.csv")
    parts = ["# Steps to the target against batch size", EXPLANATION]
    for workload in workloads:
        if not measured(workload, rows):
            continue
        parts += [
            f"## {workload.title[0].upper()}{workload.title[1:]}",
            f"{workload.measured[0].upper()}{workload.measured[1:]}. For each optimizer and batch "
            f"size: {workload.tried} settings, {_counted(workload.search_seeds, 'seed')} for each, "
            f"and {_counted(workload.seeds, 'new seed')} for the best.",
            tables(workload, rows),
        ]
        if workload.has_curve:
            plot(workload, rows, output / f"{workload.name}.png")
            parts.append(f"![{workload.title}]({workload.name}.png)")
    (output / "report.md").write_text("\n\n".join(parts) + "\n")


EXPLANATION = """\
Written by `python -m benchmarks.batch_size_curve --report` from `trials.csv`; `runs.json` has the
machine, the versions and the commands. Median steps over the seeds of the best settings, in
brackets 90% of the bootstrap's medians, in bold the fewest; `*`: the best learning rate is the
first or last of the range, a better one may lie outside; `never`: most of the runs did not reach
the target. The fit is `S = S_min (1 + B_crit / B)`, to the mean of the seeds, at the batch sizes at
which all of them reached it."""
