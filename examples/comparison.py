"""Optimizers compared over seeds: a table of medians and ranges, a verdict and a picture."""

from collections.abc import Callable, Sequence
import math
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
import numpy as np

from bookkeeping import plain
import optax_largebatch as lb


class Result(NamedTuple):
    """The result of a run."""

    optimizer: str
    batch: str  # the examples of a step, as in `128` or `4x32`
    seed: int
    learning_rate: float
    epochs: float
    steps: int
    steps_to_target: float  # infinite where the target was never reached
    test_accuracy: float
    trust_ratio: float  # of the last step, the median over the layers; NaN where there is none
    losses: np.ndarray  # of all micro-batches

    def epoch_losses(self) -> np.ndarray:
        """The mean loss of each epoch, because single losses are noisy."""
        parts = min(self.steps, max(1, round(self.epochs)))
        return np.array([part.mean() for part in np.array_split(self.losses, parts)])

    def row(self) -> dict[str, Any]:
        """The row of this run in the file."""
        row = {name: value for name, value in self._asdict().items() if name != "losses"}
        return row | {"steps_to_target": in_words(self.steps_to_target)}


Group = tuple[str, str]  # an optimizer and a batch


def by_group(results: Sequence[Result]) -> dict[Group, list[Result]]:
    """The runs of each optimizer and batch, one for each seed."""
    groups: dict[Group, list[Result]] = {}
    for result in results:
        groups.setdefault((result.optimizer, result.batch), []).append(result)
    return groups


def in_words(steps: float) -> str:
    """A number of steps, or that it is infinite."""
    return f"{steps:g}" if steps < math.inf else "never"


def one_line(results: Sequence[Result]) -> str:
    """The line that is printed when the runs of an optimizer and batch have ended."""
    reached = ", ".join(in_words(one.steps_to_target) for one in results)
    return f"{results[0].optimizer}, batch {results[0].batch}: steps to the target {reached}"


def median_and_range(values: Sequence[float], shown: Callable[[float], str]) -> str:
    """Median and range, as in `48 (45 to never)`."""
    return f"{shown(np.median(values))} ({shown(min(values))} to {shown(max(values))})"


def table(results: Sequence[Result]) -> str:
    """A line for each optimizer and batch, with medians and ranges over the seeds."""
    rows = [("optimizer", "batch", "rate", "steps", "to target", "test accuracy")]
    for (optimizer, batch), own in by_group(results).items():
        reached = median_and_range([one.steps_to_target for one in own], in_words)
        accuracy = median_and_range([one.test_accuracy for one in own], "{:.3f}".format)
        rows.append(
            (optimizer, batch, f"{own[0].learning_rate:.2g}", f"{own[0].steps}", reached, accuracy)
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def verdict(results: Sequence[Result]) -> str:
    """A sentence for each batch: who was first, and whether the seeds tell it from the others."""
    groups = by_group(results)
    sentences = []
    for batch in dict.fromkeys(batch for _, batch in groups):
        reached = {
            optimizer: [one.steps_to_target for one in own]
            for (optimizer, other), own in groups.items()
            if other == batch
        }
        first, *others = sorted(reached, key=lambda name: np.median(reached[name]))
        median = np.median(reached[first])
        level = [name for name in others if min(reached[name]) <= max(reached[first])]
        if median == math.inf:
            sentence = "no optimizer reached the target in half of its runs"
        else:
            sentence = f"{first} took the fewest steps, {median:g} in the median"
            if level:
                sentence += f", but the range of {' and of '.join(level)} overlaps with its own"
            elif others:
                sentence += ", and even its slowest run was ahead of all runs of the others"
        sentences.append(f"At batch {batch} {sentence}.")
    return "\n".join(sentences)


def draw(results: Sequence[Result], target: float, path: Path) -> None:
    """For each batch each run's steps to the target, and below them the training loss."""
    groups = by_group(results)
    batches = list(dict.fromkeys(batch for _, batch in groups))
    optimizers = list(dict.fromkeys(optimizer for optimizer, _ in groups))
    figure = Figure(figsize=(1 + 4 * len(batches), 6), layout="constrained")
    axes = figure.subplots(2, len(batches), squeeze=False, sharey="row", height_ratios=(3, 2))
    colours = dict(zip(optimizers, lb.plots.COLOURS, strict=False))
    for (optimizer, batch), own in groups.items():
        reached, loss = axes[:, batches.index(batch)]
        row, colour = optimizers.index(optimizer), colours[optimizer]
        for one in own:
            ever = one.steps_to_target < math.inf
            place = one.steps_to_target if ever else one.steps
            reached.plot(place, row, "o" if ever else "x", color=colour, alpha=0.5)
        median = np.median([one.steps_to_target for one in own])
        if median < math.inf:
            reached.plot(median, row, "|", color=colour, markersize=24)
        losses = np.stack([one.epoch_losses() for one in own])
        epochs = own[0].epochs * np.arange(1, losses.shape[1] + 1) / losses.shape[1]
        loss.plot(epochs, np.median(losses, axis=0), color=colour)
        loss.fill_between(
            epochs, losses.min(0), losses.max(0), color=colour, alpha=0.15, linewidth=0
        )
    for (reached, loss), batch in zip(axes.T, batches, strict=True):
        plain(reached, title=f"batch {batch}", xlabel="steps (x: never)")
        plain(loss, xlabel="epoch", yscale="log")
    axes[0, 0].set(yticks=range(len(optimizers)), yticklabels=optimizers)
    axes[0, 0].set_ylim(len(optimizers) - 0.5, -0.5)
    for name, label in zip(optimizers, axes[0, 0].get_yticklabels(), strict=True):
        label.set_color(colours[name])
    axes[1, 0].set(ylabel="training loss, median and range")
    figure.suptitle(f"Steps to a validation accuracy of {target:g}: each run, and the median")
    figure.savefig(path, dpi=200)
