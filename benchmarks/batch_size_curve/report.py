"""Tables, fits and plots, from the table of trials alone."""

from collections.abc import Sequence
import itertools
import math
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
import numpy as np

from benchmarks.batch_size_curve.search import Settings, on_edge
from benchmarks.batch_size_curve.sweep import Row, cells_of, read
from benchmarks.batch_size_curve.workloads import Workload
import optax_largebatch as lb

MOST_CURVES = 10
COLOURS = {
    "adamw": "#000000",
    "sgd": "#7f7f7f",
    "plain sgd": "#bcbd22",
    "lamb": "#0072b2",
    "lans": "#d55e00",
    "lars": "#009e73",
    "lbsgd": "#e69f00",
    "scaled_adam": "#cc79a7",
    "eve": "#56b4e9",
    "cain": "#8c564b",
    "learned_gradient": "#9467bd",
    "nadamw": "#7f7f7f",
    "muon": "#009e73",
    "muon_with_trust_ratio": "#e69f00",
    "muon_and_adamw": "#8c564b",
    "muon_and_lamb": "#bcbd22",
    "lans_without_nesterov": "#e69f00",
    "lans_without_normalization": "#cc79a7",
    "lans_without_trust_ratio": "#56b4e9",
    "adamw_momentum_0.8": "#8c564b",
    "adamw_momentum_0.95": "#bcbd22",
    "lamb_one_norm": "#56b4e9",
    "lans_one_norm": "#e69f00",
}


class Measured(NamedTuple):
    """An optimizer at a batch size."""

    runs: tuple[float, ...]
    """Steps to the target of the best settings with each seed, or what else is measured."""
    edge: bool
    """Whether these have the smallest or the largest learning rate of the range."""
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
    """90% of the medians of runs drawn from these, again and again."""
    own = np.sort(runs)
    draws = np.random.default_rng(seed).integers(len(own), size=(resamples, len(own)))
    medians = own[np.sort(draws, axis=1)[:, (len(own) - 1) // 2]]
    low, high = np.quantile(medians, (0.05, 0.95), method="inverted_cdf")
    return float(low), float(high)


def measured(workload: Workload, rows: list[Row]) -> dict[str, dict[int, Measured]]:
    """What is complete, by optimizer and batch size: what has had its whole budget."""
    results: dict[str, dict[int, Measured]] = {}
    for (optimizer, batch_size), cell in cells_of(workload, rows).items():
        if not cell.complete:
            continue
        if cell.best is None:
            own = Measured((math.inf,), edge=False, settings=None, test_losses=())
        else:
            own = Measured(
                tuple(workload.measure.report(row.outcome) for row in cell.repeats),
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
    """Median steps, their interval, and what has to be said of them."""
    if not math.isfinite(cell.median):
        return "never"
    text = f"**{cell.median:.4g}**" if cell.median == fewest else f"{cell.median:.4g}"
    if len(cell.runs) > 1:
        text += " ({:.4g} to {:.4g})".format(*bootstrap_interval(cell.runs))
    return text + "\\*" * cell.edge


def steps_column(results: dict[str, dict[int, Measured]], batch_size: int) -> dict[str, str]:
    """What every optimizer needs at a batch size, the fewest in bold; those that are complete."""
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


def plot(workload: Workload, rows: list[Row], path: Path) -> None:
    """Median steps against batch size; hollow where the best rate is at the edge of its range.

    A bar that leaves at the top is infinite: some runs did not reach the target. Only the first ten
    optimizers are drawn, because more cannot be told apart.
    """
    results = dict(itertools.islice(measured(workload, rows).items(), MOST_CURVES))
    figure, axes = plt.subplots(figsize=(8.5, 5), layout="constrained")
    shifts = 1.03 ** (np.arange(len(results)) - (len(results) - 1) / 2)  # so that bars stand apart
    every = []
    for (optimizer, cells), shift in zip(results.items(), shifts, strict=True):
        kept = {size: own for size, own in cells.items() if math.isfinite(own.median)}
        if not kept:
            continue
        style = {"color": COLOURS[optimizer]}
        x = np.array(list(kept)) * shift
        medians = np.array([own.median for own in kept.values()])
        low, high = np.array([bootstrap_interval(own.runs) for own in kept.values()]).T
        axes.vlines(x, low, np.minimum(high, 1e9), lw=1, alpha=0.5, **style)
        axes.plot(x, medians, lw=1.3, marker="o", ms=5, label=optimizer, **style)
        edges = [own.edge for own in kept.values()]
        axes.plot(x[edges], medians[edges], "o", ms=5, mfc="white", **style)
        every += [*medians, *low, *high[np.isfinite(high)]]
    low, high = min(every) * 0.85, max(every) * 1.15
    axes.set(xscale="log", yscale="log", ylim=(low, high), title=workload.title)
    axes.set(xlabel="batch size", ylabel=workload.measured)
    axes.set_xticks(workload.batch_sizes, [str(size) for size in workload.batch_sizes])
    marks = [digit * 10**power for power in range(7) for digit in (1, 2, 5)]
    marks = [mark for mark in marks if low < mark < high]
    axes.set_yticks(marks, [str(mark) for mark in marks])
    axes.minorticks_off()
    axes.grid(color="#e5e5e5")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _counted(count: int, what: str) -> str:
    """As in `1 seed` or `3 seeds`."""
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
