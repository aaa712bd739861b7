"""Code that the examples share and that is not about the library: options, tables and axes."""

import argparse
from collections.abc import Callable, Mapping, Sequence
import csv
import json
import math
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
import numpy as np

import optax_largebatch as lb


def number(
    kind: type[int] | type[float], allowed: str, is_allowed: Callable[[Any], bool]
) -> Callable[[str], Any]:
    """An argparse type: the numbers for which `is_allowed` is true, in words `allowed`."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not is_allowed(value):
            raise argparse.ArgumentTypeError(f"must be {allowed}, got {text!r}")
        return value

    return parse


COUNT = number(int, "a whole number of 1 or more", lambda value: value >= 1)
SEVERAL = number(int, "a whole number of 2 or more", lambda value: value >= 2)
SEED = number(int, "a whole number from 0 to 4294967295", lambda value: 0 <= value < 2**32)
NOT_NEGATIVE = number(float, "a number of 0 or more", lambda value: 0 <= value < math.inf)
POSITIVE = number(float, "a positive number", lambda value: 0 < value < math.inf)
SHARE = number(float, "a number from 0 to 1", lambda value: 0 <= value <= 1)


def same_options(args: argparse.Namespace, file: Path, resumed: bool) -> None:
    """Notes the options of a run; ends the program if a resumed run had other options."""
    now = {name: str(value) for name, value in vars(args).items() if name != "output"}
    if not resumed:
        file.write_text(json.dumps(now, indent=2) + "\n")
        return
    for name, value in json.loads(file.read_text()).items():
        if now.get(name) != value:
            raise SystemExit(
                f"--{name.replace('_', '-')} must be {value}, as when the run in {args.output} "
                f"began; got {now.get(name)}. Give that, or another --output."
            )


class Table:
    """A CSV file to which rows are added as they come."""

    def __init__(self, path: Path, keep: int = 0) -> None:
        """Continues after the first `keep` rows of the file; later rows are dropped."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.rows: list[Mapping[str, Any]] = []
        if keep:
            with path.open(newline="") as file:
                kept = [row for _, row in zip(range(keep), csv.DictReader(file), strict=False)]
            self._write(kept, path.with_suffix(".tmp"), "w")
            path.with_suffix(".tmp").replace(path)  # whole or not at all, if killed just now
        else:
            path.unlink(missing_ok=True)

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Adds rows, all with the same columns."""
        self._write(rows, self.path, "a")

    def _write(self, rows: Any, path: Path, mode: str) -> None:
        with path.open(mode, newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            if not self.rows:
                writer.writeheader()
            writer.writerows(rows)
        self.rows.extend(rows)

    def __getitem__(self, column: str) -> np.ndarray:
        """A column as numbers, NaN where it is empty."""
        return np.array([row[column] or math.nan for row in self.rows], float)


def draw(table: Table, panels: Mapping[str, Sequence[str]], path: Path) -> None:
    """Draws columns against the step, some columns under each label."""
    figure = Figure(figsize=(11, 2 + 2.5 * math.ceil(len(panels) / 2)), layout="constrained")
    axes = figure.subplots(math.ceil(len(panels) / 2), 2, sharex=True, squeeze=False)
    for axis, (label, columns) in zip(axes.flat, panels.items(), strict=False):
        for column, colour in zip(columns, lb.plots.COLOURS, strict=False):
            known = ~np.isnan(table[column])
            axis.plot(table["step"][known], table[column][known], color=colour, label=column)
        plain(axis, ylabel=label, yscale="log" if len(columns) > 2 else "linear")
        if len(columns) > 1:
            axis.legend(frameon=False)
    for axis in axes[-1]:
        axis.set(xlabel="step")
    figure.savefig(path, dpi=200)


def plain(axis: Axes, **settings: Any) -> None:
    """Axes with a grid and without a box."""
    axis.set(**settings)
    axis.grid(color="#e5e5e5")
    axis.spines[["top", "right"]].set_visible(False)
