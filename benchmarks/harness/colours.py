"""The style of all pictures: they are seen on white paper and on dark, and by the colour-blind.

Importing it is enough: pictures are transparent, with grey letters.
"""

from collections.abc import Iterable
import itertools

import matplotlib

INK = "#7A7A7A"
matplotlib.use("Agg")
matplotlib.rcParams |= {
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "savefig.dpi": 200,
    "savefig.transparent": True,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}

COLOURS = {
    "adamw": "#666666",
    "lamb": "#0072B2",
    "lans": "#D55E00",
    "muon": "#009E73",
    "muonh": "#CC79A7",
    "adamh": "#E69F00",
    "nadamw": "#8B5CF6",
}
"""The colour of each optimizer, the same in every picture; most are those of Okabe and Ito."""
OTHERS = ("#56B4E9", "#882255", "#999933", "#44AA99", "#661100", "#6699CC", "#AA4499")


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """The colours of any optimizers: those of `COLOURS`, and for others the next that is free."""
    others = itertools.cycle(OTHERS)
    return {name: COLOURS.get(name) or next(others) for name in names}
