"""The picture of compiled steps."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.colors import to_rgb
import numpy as np

from benchmarks.harness.colours import COLOURS
from benchmarks.harness.optimizers import OPTIMIZERS


def colour(name: str) -> Any:
    """The optimizer's colour, paler for optax's version of an optimizer that is here, too."""
    own = np.array(to_rgb(COLOURS[name.removeprefix("optax.")]))
    return 0.35 * own + 0.65 if name in ("optax.lamb", "optax.lars") else own


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Bytes for each parameter, a panel for each target; a mark shows the floor."""
    targets = list(dict.fromkeys(row["target"] for row in rows))
    cases = {x: list(dict.fromkeys(r["case"] for r in rows if r["target"] == x)) for x in targets}
    figure, panels = pyplot.subplots(
        len(targets),
        1,
        figsize=(5.6, 0.7 * sum(map(len, cases.values())) + 0.5 * len(targets)),
        height_ratios=[len(cases[x]) for x in targets],
        squeeze=False,
        sharex=True,
        layout="constrained",
    )
    for panel, target in zip(panels[:, 0], targets, strict=True):
        for place, case in enumerate(cases[target]):
            own = [r for r in rows if (r["target"], r["case"]) == (target, case)]
            for k, row in enumerate(own):
                y = place + 0.8 * ((k + 0.5) / len(own) - 0.5)
                height, name = 0.8 / len(own), row["optimizer"]
                panel.barh(y, row["bytes_for_each_parameter"], 0.9 * height, color=colour(name))
                if row["floor"]:
                    panel.plot([row["floor"]] * 2, [y - height / 2, y + height / 2], "k", lw=1.5)
        panel.set_yticks(range(len(cases[target])), cases[target])
        panel.set_ylim(len(cases[target]) - 0.5, -0.5)
        panel.set_title(target, loc="left")
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("bytes for each parameter\n(black: the least without a cache)")
    present = [x for x in OPTIMIZERS if any(row["optimizer"] == x for row in rows)]
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour(name)) for name in present]
    figure.legend(handles, present, loc="outside upper center", ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)
    pyplot.close(figure)
