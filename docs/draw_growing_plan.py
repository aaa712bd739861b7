"""Draws the picture of the guide "From AdamW at 512 to 16k": a plan that grows, and its four rates.

python -m docs.draw_growing_plan
"""

from pathlib import Path

import jax
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
import numpy as np

from benchmarks.harness.colours import COLOURS, INK
import optax_largebatch as lb

PICTURE = Path(__file__).parent / "static" / "growing_plan.png"
RUN = lb.TunedRun(
    "adamw",
    batch_size=512,
    total="51.2M",
    learning_rate=lb.PlannedRate(3e-4, warmup="1M", decay="linear"),
    weight_decay=0.05,
    decay_kind="decoupled",
)


def draw_rates(axis: Axes, run: lb.TunedRun) -> None:
    """The four peaks that a search tries, over the run; the plan's own is thick."""
    plan = lb.batch_plan("0:512 1M:2048 5M:8192 15M:16384", total="76.8M", run=run)
    steps = np.arange(1, plan.total_steps - 1)
    seen = [plan.examples_at(step) for step in steps]
    for peak in plan.rates:
        is_own = peak == plan.rates[2]
        rates = jax.vmap(plan.with_peak(peak).learning_rate)(steps)
        colour = COLOURS[run.optimizer]
        axis.plot(seen, rates, color=colour, linewidth=2.5 if is_own else 1)
        highest = float(rates.max())
        place = {"xytext": (0, 2), "textcoords": "offset points", "fontsize": "small"}
        axis.annotate(f"{peak:.2g}", (16e6, highest), **place)
    axis.set_ylim(0, 0.98 * plan.rates[-1])
    axis.set_title(f"rate of {run.optimizer}: four peaks, thick the plan's", loc="left")


def draw() -> Figure:
    """The batch size, and the rates of MuonH and of AdamW."""
    figure = Figure(figsize=(4.6, 6), layout="constrained")
    above, *below = figure.subplots(3, sharex=True, height_ratios=(2, 3, 3))
    plan = lb.batch_plan("0:512 1M:2048 5M:8192 15M:16384", total="76.8M")
    starts = [stage.first_step for stage in plan.stages]
    sizes = [stage.batch_size for stage in plan.stages]
    ends = [plan.examples_at(step) for step in (*starts, plan.total_steps)]
    above.stairs(sizes, ends, color=INK, linewidth=2.5, baseline=None)
    above.set(yscale="log", yticks=sizes)
    above.set_yticks(sizes, [f"{size:,}" for size in sizes])
    above.minorticks_off()
    above.set_title("batch size", loc="left")
    for axis, run in zip(below, (RUN.to("muonh"), RUN), strict=True):
        draw_rates(axis, run)
    below[-1].set_xlabel("examples seen")
    below[-1].xaxis.set_major_formatter(EngFormatter(sep=""))
    return figure


if __name__ == "__main__":
    draw().savefig(PICTURE)
