"""Draws the picture of the front page from what notebook 03 computes on eight devices.

python -m docs.draw_front_page
"""

from collections.abc import Mapping
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.figure import Figure

from optax_largebatch.diagnostics.plots import COLOURS

DOCS = Path(__file__).parent
NOTEBOOK = DOCS.parent / "notebooks" / "03_many_devices.ipynb"
PICTURE = DOCS / "static" / "same_everywhere.png"
INSTALLATION = 1  # the number of the cell that installs the package in Colab


def distances() -> tuple[dict[str, float], set[str]]:
    """How far each way to train ends from the result of one device, and which ways are wrong."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    names: dict[str, Any] = {}
    for cell in cells[INSTALLATION + 1 :]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    return names["differences"], names["wrong"]


def draw(values: Mapping[str, float], wrong: set[str]) -> Figure:
    """A dot for each way to train, those that lose the norm of a layer in orange."""
    figure = Figure(figsize=(4.6, 2.7), layout="constrained")
    axis = figure.subplots()
    names = sorted(values, key=lambda name: -values[name])
    for row, name in enumerate(names):
        axis.plot(values[name], row, "o", color=COLOURS[name in wrong])
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.grid(axis="y", color="#e5e5e5")
    axis.set(xscale="log", xlim=(1e-8, 2), xlabel="distance from the result of one device")
    axis.axvline(1e-5, color="black", linewidth=0.8)
    axis.text(1.4e-5, len(names) - 1.5, "left: rounding of float32", fontsize=8, va="center")
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    draw(*distances()).savefig(PICTURE, dpi=200)
