"""The picture of compiled steps."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

COLORS = {
    "optax.adamw": "#888888",
    "optax.lamb": "#b9c8dd",
    "optax.lars": "#d9cbb2",
    "lamb": "#2f6fb3",
    "lans": "#b3432f",
    "lars": "#b3862f",
    "larc": "#8c6a25",
    "lbsgd": "#6b5a3a",
    "adamh": "#7b4fa3",
    "eve": "#7fb069",
    "cain": "#55803f",
    "scaled_adam": "#2f6b3a",
}


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Bytes for each parameter, a panel for each target; a mark shows the floor."""
    targets = list(dict.fromkeys(row["target"] for row in rows))
    cases = {x: list(dict.fromkeys(r["case"] for r in rows if r["target"] == x)) for x in targets}
    figure, panels = pyplot.subplots(
        len(targets),
        1,
        figsize=(5.6, 0.9 * sum(map(len, cases.values())) + 0.5 * len(targets)),
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
                panel.barh(y, row["bytes_for_each_parameter"], 0.9 * height, color=COLORS[name])
                if row["floor"]:
                    panel.plot([row["floor"]] * 2, [y - height / 2, y + height / 2], "k", lw=1.5)
        panel.set_yticks(range(len(cases[target])), cases[target])
        panel.set_ylim(len(cases[target]) - 0.5, -0.5)
        panel.set_title(target, loc="left")
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("bytes for each parameter\n(black: the least without a cache)")
    present = [x for x in COLORS if any(row["optimizer"] == x for row in rows)]
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLORS[name]) for name in present]
    figure.legend(handles, present, loc="outside upper center", ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
