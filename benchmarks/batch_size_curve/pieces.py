"""LANS taken apart: what each of its pieces brings, wherever it is added."""

from collections.abc import Sequence
import math
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
import numpy as np

from benchmarks.batch_size_curve.report import Measured, bootstrap_interval, colours, measured
from benchmarks.batch_size_curve.sweep import read
from benchmarks.batch_size_curve.workloads import PIECES, Workload

Results = dict[str, dict[int, Measured]]
Groups = dict[str, tuple[tuple[str, str], ...]]

# Each pair differs in one piece. Of all ways to put the three together only normalised gradients
# alone are left out.
ADDED: Groups = {
    "Nesterov's momentum": (
        ("adamw", "nadamw"),
        ("lamb", "lans_without_normalization"),
        ("lans_without_nesterov", "lans"),
    ),
    "normalised gradients": (
        ("nadamw", "lans_without_trust_ratio"),
        ("lamb", "lans_without_nesterov"),
        ("lans_without_normalization", "lans"),
    ),
    "trust ratio": (
        ("adamw", "lamb"),
        ("nadamw", "lans_without_normalization"),
        ("lans_without_trust_ratio", "lans"),
    ),
}
# What one could exchange for what, whatever it is made of.
EXCHANGED: Groups = {
    "LANS": (("adamw", "lans"), ("nadamw", "lans")),
    "Muon": (("adamw", "muon"), ("nadamw", "muon"), ("lans", "muon")),
}
# Muon's steps as long as LAMB's; embeddings and the last layer left to others, as its authors do.
VARIED: Groups = {
    "with a trust ratio": (("muon", "muon_with_trust_ratio"),),
    "layers alone, the rest by AdamW": (("muon", "muon_and_adamw"), ("lans", "muon_and_adamw")),
    "layers alone, the rest by LAMB": (("muon", "muon_and_lamb"), ("lans", "muon_and_lamb")),
}
# A momentum that forgets faster, which is no change of the algorithm at all.
TUNED: Groups = {
    "a momentum of 0.8": (
        ("adamw", "adamw_momentum_0.8"),
        ("nadamw", "adamw_momentum_0.8"),
        ("lamb", "lamb_momentum_0.8"),
        ("lans", "lans_momentum_0.8"),
        ("muon", "muon_momentum_0.8"),
    ),
    "LANS and Muon in the place of AdamW": (
        ("adamw_momentum_0.8", "lans"),
        ("adamw_momentum_0.8", "muon"),
    ),
    "all with 0.8": (
        ("adamw_momentum_0.8", "lamb_momentum_0.8"),
        ("adamw_momentum_0.8", "lans_momentum_0.8"),
        ("adamw_momentum_0.8", "muon_momentum_0.8"),
        ("lans_momentum_0.8", "muon_momentum_0.8"),
    ),
}
RESAMPLES = 2000
MOST_PANELS = 4
TICKS = (0.5, 0.7, 1.0, 1.5, 2.0, 3.0)


class Saved(NamedTuple):
    """The part of the steps that an optimizer saves over another; negative where it needs more."""

    share: float
    low: float
    high: float
    """From `low` to `high`: 90% of the bootstrap."""

    @property
    def clear(self) -> bool:
        """Whether the interval is on one side of 0."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        text = f"{100 * self.share:.0f}%"
        text = f"**{text}**" if self.clear else text
        return f"{text} ({100 * self.low:.0f} to {100 * self.high:.0f})"


def medians(runs: Sequence[float], draw: np.random.Generator) -> np.ndarray:
    """The medians of runs drawn from these, again and again."""
    own = np.asarray(runs)
    return np.median(own[draw.integers(len(own), size=(RESAMPLES, len(own)))], axis=1)


def saved(before: Sequence[Measured], after: Sequence[Measured]) -> Saved:
    """What the second saves: at a batch size, or in the geometric mean over several."""
    draw = np.random.default_rng(0)
    pairs = list(zip(before, after, strict=True))
    resampled = [1 / medians(own.runs, draw) * medians(new.runs, draw) for own, new in pairs]
    low, high = np.quantile(1 - _geometric_mean(resampled), (0.05, 0.95), method="inverted_cdf")
    share = 1 - _geometric_mean([np.asarray(new.median / own.median) for own, new in pairs])
    return Saved(float(share), float(low), float(high))


def _geometric_mean(ratios: Sequence[np.ndarray]) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.exp(np.mean(np.log(ratios), axis=0))


def common_sizes(results: Results, names: Sequence[str]) -> list[int]:
    """The batch sizes at which all of these have been measured."""
    first, *rest = (results.get(name, {}) for name in names)
    return [size for size in first if all(size in own for own in rest)]


def sizes_of(results: Results, groups: Groups) -> list[int]:
    """The batch sizes at which all optimizers of a table have been measured."""
    names = dict.fromkeys(name for pairs in groups.values() for pair in pairs for name in pair)
    return common_sizes(results, list(names))


def saved_table(results: Results, groups: Groups) -> str:
    """The steps that are saved from one optimizer to another, by batch size."""
    sizes = sizes_of(results, groups)
    columns = [*map(str, sizes), "all of them"]
    lines = [
        f"| from one to the other | {' | '.join(columns)} |",
        "|---|" + "---|" * len(columns),
    ]
    for group, pairs in groups.items():
        for before, after in pairs:
            texts = [
                str(saved_between(results, before, after, own))
                for own in (*([size] for size in sizes), sizes)
            ]
            lines.append(f"| {group}: `{before}` to `{after}` | {' | '.join(texts)} |")
    return "\n".join(lines)


def saved_between(results: Results, before: str, after: str, sizes: Sequence[int]) -> Saved:
    """What an optimizer saves over another at these batch sizes."""
    return saved(
        [results[before][size] for size in sizes], [results[after][size] for size in sizes]
    )


def plot_pieces(results: Results, path: Path) -> None:
    """Steps over AdamW's median, at some four batch sizes: bars are over the seeds.

    What has not been run is left out.
    """
    reference = results["adamw"]
    sizes = list(reference)[:: math.ceil(len(reference) / MOST_PANELS)]
    lines = math.ceil(len(sizes) / 2)
    figure, axes = plt.subplots(
        *(lines, 2),
        figsize=(5.6, 2.5 * lines),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for unused in axes.flat[len(sizes) :]:
        unused.remove()
    own_colours = colours(PIECES)
    for size, own in zip(sizes, axes.flat, strict=False):
        whole = reference[size].median
        for row, name in enumerate(PIECES):
            cell = results.get(name, {}).get(size)
            if cell is None:
                continue
            low, high = (min(end / whole, 1e3) for end in bootstrap_interval(cell.runs))
            own.plot([low, high], [row, row], lw=1.5, alpha=0.5, color=own_colours[name])
            own.plot(cell.median / whole, row, "o", ms=5, color=own_colours[name])
        own.axvline(1, lw=1, color="#000000")
        own.set(title=f"batch {size}", xscale="log", xlim=(0.4, 3))
        own.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
        own.minorticks_off()
        own.grid(axis="x", color="#e5e5e5")
        own.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_yticks(range(len(PIECES)), PIECES)
    axes[0, 0].invert_yaxis()
    figure.supxlabel("steps over AdamW's", fontsize=10)
    figure.savefig(path, dpi=200)
    plt.close(figure)


def write_pieces(output: Path, workloads: Sequence[Workload]) -> None:
    """A plot of each workload that has the pieces."""
    rows = read(output / "trials.csv")
    for workload in workloads:
        results = measured(workload, rows)
        if workload.has_curve and {"adamw", "nadamw"} <= set(results):
            plot_pieces(results, output / f"{workload.name}_apart.png")
