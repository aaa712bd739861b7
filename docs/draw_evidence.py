"""Draws the pictures of Evidence: MuonH's lead, what moved settings lose, and runs of four lengths.

python -m docs.draw_evidence
"""

from collections.abc import Iterator
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
import numpy as np

from benchmarks import critical_batch_of_tokens as tokens
from benchmarks import transfer
from benchmarks.harness.colours import COLOURS, INK
from benchmarks.harness.results import COMMITTED, read
from benchmarks.tuned.intervals import Difference, difference
from benchmarks.tuned.workloads import BERT, CAUSAL, CAUSAL_LONG, DIGITS, Workload

FOLDER = Path(__file__).parent / "static"
WAYS = {"kept": "#999999", "sqrt": COLOURS["adamh"], "law": COLOURS["lamb"]}
FARTHEST = 0.65
"""Of the losses over a search that are shown; what is worse is at the edge."""


def draw_lead(axes: Axes, workload: Workload) -> None:
    """What each optimizer loses more than MuonH, over the batch size, with its interval."""
    results = transfer.searches(workload)
    batches = list(workload.plans)
    for place, name in enumerate(("adamw", "lamb", "lans", "muon")):
        lost = [difference(results[name][x].losses, results["muonh"][x].losses) for x in batches]
        x = np.array([float(batch) for batch in batches]) * 1.06 ** (place - 1.5)
        _bars(axes, "x", x, lost, "o-", color=COLOURS[name], label=name)
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set(xscale="log", xlabel="batch size", ylabel="loss over that of MuonH")
    axes.set_xticks([float(batch) for batch in batches], batches)
    axes.minorticks_off()
    axes.set_title(workload.title, loc="left", fontsize=10)


def moves(workload: Workload) -> Iterator[tuple[str, dict[str, Difference]]]:
    """Each move to a batch 8 times as large or more, and what each way loses to a search there."""
    rows = transfer.committed_rows()
    losses, results = transfer.losses_of(rows, workload), transfer.searches(workload)
    for optimizer in workload.optimizers:
        for small, large in transfer.pairs_of(workload):
            place = (workload.name, optimizer, small, large)
            ways = {way: losses[*place, way] for way in WAYS if (*place, way) in losses}
            if int(large) >= 8 * int(small) and "law" in ways:
                search = transfer.searched(losses, place, results)
                yield (
                    f"{optimizer}, {small} to {large}",
                    {way: difference(own, search) for way, own in ways.items()},
                )


def draw_moves(axes: Axes, workload: Workload) -> None:
    """A line for each move."""
    names, lines = zip(*moves(workload), strict=True)
    for shift, (way, colour) in zip((0.2, 0.0, -0.2), WAYS.items(), strict=True):
        places = [place for place, ways in enumerate(lines) if way in ways]
        lost = [lines[place][way] for place in places]
        if lost:
            _bars(axes, "y", np.array(places) + shift, lost, "o", color=colour, label=way)
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set(ylim=(len(names) - 0.5, -0.5), xlim=(-0.12, FARTHEST))
    axes.set_title(workload.title, loc="left", fontsize=10)


def _bars(
    axes: Axes, along: str, places: np.ndarray, lost: list[Difference], style: str, **options: str
) -> None:
    """Differences with their intervals, at places along an axis."""
    means = np.array([own.mean for own in lost])
    reach = np.array([own.high - own.mean for own in lost])
    if along == "x":
        axes.errorbar(places, means, reach, fmt=style, ms=4, lw=1.2, **options)
    else:
        axes.errorbar(
            means.clip(max=FARTHEST), places, xerr=reach, fmt=style, ms=4, lw=1, **options
        )


def lead() -> Figure:
    """Two networks side by side."""
    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    for axes, workload in zip(figure.subplots(1, 2), (BERT, CAUSAL), strict=True):
        draw_lead(axes, workload)
    axes.legend(frameon=False, fontsize=8)
    return figure


def moved() -> Figure:
    """Three networks, and the long runs."""
    workloads = (BERT, CAUSAL, CAUSAL_LONG, DIGITS)
    heights = [len(list(moves(workload))) + 1.5 for workload in workloads]
    figure = Figure(figsize=(5.6, 10), layout="constrained")
    panels = figure.subplots(4, 1, height_ratios=heights, sharex=True)
    for axes, workload in zip(panels, workloads, strict=True):
        draw_moves(axes, workload)
    panels[0].legend(frameon=False, fontsize=8, loc="lower right")
    panels[-1].set_xlabel("loss over that of a search at the large batch")
    return figure


def token_rows() -> list[tokens.Row]:
    """Runs of four lengths."""
    return read(COMMITTED / "cpu-2-cores" / f"{tokens.NAME}.csv", tokens.Row)


def lengths() -> Figure:
    """The loss over the batch size, in the shortest and in the longest runs."""
    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    over = tokens.law_over_search(token_rows())
    for axes, number in zip(figure.subplots(1, 2), (0, -1), strict=True):
        budget = tokens.BUDGETS[number]
        for name in tokens.WORKLOAD.optimizers:
            losses = tokens.losses_of(token_rows(), name)
            means = {x: np.mean([*losses[x][budget].values()]) for x in tokens.BATCHES}
            _curve(axes, means, name, "o-", label=name)
            if name == "muonh":
                moved = {x: means[x] + over[f"16 to {x}"][number].mean for x in tokens.BATCHES[1:]}
                _curve(axes, moved, name, "x:", label="muonh by the law, from 16")
        axes.set(xscale="log", xlabel="batch size", ylabel="test loss")
        axes.set_xticks(tokens.BATCHES, map(str, tokens.BATCHES))
        axes.minorticks_off()
        axes.set_title(f"{budget * tokens.TOKENS / 1000:.0f} thousand tokens", loc="left", size=10)
    axes.legend(frameon=False, fontsize=8)
    return figure


def _curve(axes: Axes, losses: dict[int, float], name: str, style: str, label: str) -> None:
    axes.plot([*losses], [*losses.values()], style, ms=5, lw=1.2, color=COLOURS[name], label=label)


if __name__ == "__main__":
    lead().savefig(FOLDER / "lead.png")
    moved().savefig(FOLDER / "moves.png")
    lengths().savefig(FOLDER / "lengths.png")
