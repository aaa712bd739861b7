"""Plots of a run, drawn with matplotlib. Each returns its axes: `ax.figure.savefig(...)`."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_largebatch.diagnostics.diagnose import EXPLODED
from optax_largebatch.plans.plan import BatchPlan
from optax_largebatch.plans.table import shown_numbers, telling_steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""The colours of Okabe and Ito, which colour-blind readers can tell apart."""

LONGEST_NAME = 44
"""The number of characters of a layer's name that are shown."""

MOST_NAMES = 80
"""The number of names beside a heat map."""


def trust_ratios(
    history: Mapping[str, Any],
    *,
    steps: Sequence[float] | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    r"""The trust ratio of each layer over time, as a heat map.

    White is the median of all ratios. The colour shows how far a ratio is from it, on a logarithmic
    scale up to a factor of 100. Grey is a ratio of exactly 1: the parameter is not adapted or is
    zero. Black is a ratio that is not finite or not positive.

    Args:
        history: the results of `optax_largebatch.trust_ratios`, stacked along a new first axis: by
            name, an array of shape (times,), or (times, layers...) for a parameter that stacks
            layers. `jax.lax.scan` collects them in this form; a list of results is converted by
            `jax.tree.map(lambda *ratios: jnp.stack(ratios), *records)`.
        steps: the step of each time, increasing; None for 0, 1, 2, ...
        ax: where to draw; None for a new figure.

    Returns:
        The axes.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is nothing to draw, or the lengths differ.

    Examples:
        >>> import jax, jax.numpy as jnp, matplotlib, optax
        >>> matplotlib.use("Agg")
        >>> from optax_largebatch import lamb, plots, trust_ratios
        >>> params = {"out": jnp.ones((2, 2)), "embedding": jnp.ones((3, 2))}
        >>> optimizer = lamb(0.1)
        >>> def step(carry, _):
        ...     params, state = carry
        ...     updates, state = optimizer.update(params, state, params)
        ...     params = optax.apply_updates(params, updates)
        ...     return (params, state), trust_ratios(optimizer, state, params)
        >>> _, history = jax.lax.scan(step, (params, optimizer.init(params)), length=5)
        >>> ax = plots.trust_ratios(history)
        >>> print(ax.get_xlabel())
        step
    """
    plt = _pyplot()
    from matplotlib.ticker import LogFormatter

    names, table = _rows(history)
    times = np.asarray(range(table.shape[1]) if steps is None else steps, dtype=float)
    if times.shape != (table.shape[1],) or np.any(np.diff(times) <= 0):
        raise ValueError(
            f"steps must be {table.shape[1]} increasing numbers, got {times.tolist()!r}."
        )
    if times.size == 1:  # matplotlib gives a single column no width
        times = times + np.array([-0.25, 0.25])
        table = np.repeat(table, 2, axis=1)
    shown = np.isfinite(table) & (table > 0)
    adapted = table[shown & (table != 1)]
    middle = float(np.median(adapted)) if adapted.size else 1.0
    spread = np.exp(np.abs(np.log(adapted / middle)).max(initial=0))
    spread = min(max(1.05 * spread, 1.5), EXPLODED)

    height = max(1.0 + 0.17 * min(len(names), MOST_NAMES), 3.0)
    plot: Axes = ax or plt.subplots(figsize=(9, height), layout="constrained")[1]
    of_ratios = plt.get_cmap("PuOr_r").with_extremes(bad="black")
    rows = range(len(names))
    image = plot.pcolormesh(
        times, rows, np.ma.masked_array(table, ~shown), cmap=of_ratios,
        norm="log", vmin=middle / spread, vmax=middle * spread, rasterized=True,
    )  # fmt: skip
    ones = np.ma.masked_array(table, table != 1)
    plot.pcolormesh(times, rows, ones, cmap="Greys", vmin=0, vmax=4, rasterized=True)
    plot.set_facecolor("black")
    every = -(-len(names) // MOST_NAMES)
    plot.set_yticks(range(0, len(names), every), [*map(_shortened, names[::every])], fontsize=8)
    plot.tick_params(axis="y", length=0)
    plot.set_ylim(len(names) - 0.5, -0.5)
    plot.set(xlabel="step", title="Trust ratios")
    bar = plot.figure.colorbar(image, ax=plot, extend="both", pad=0.02, aspect=30)
    bar.formatter = bar.minorformatter = LogFormatter()
    bar.set_label(f"ratio (median, white: {middle:.2g})")
    return plot


def batch_plan(
    plan: BatchPlan,
    *,
    axes: "Sequence[Axes] | None" = None,
) -> "Sequence[Axes]":
    r"""A plan before the run: its batch size and its numbers against what was seen.

    Args:
        plan: the plan.
        axes: where to draw, one above the other: the batch size, and if the plan has a run, the
            learning rate, the weight decay unless it is 0, and the momentum or b1; None for a new
            figure.

    Returns:
        The axes.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: `plan` is no `BatchPlan`.

    Examples:
        >>> import matplotlib
        >>> matplotlib.use("Agg")
        >>> from optax_largebatch import PlannedRate, TunedRun, batch_plan, plots
        >>> run = TunedRun("lamb", batch_size=512, total="2M", learning_rate=PlannedRate(1e-3))
        >>> axes = plots.batch_plan(batch_plan("0:512 1M:1024", total="2M", run=run))
        >>> print([ax.get_ylabel() for ax in axes])
        ['batch size', 'learning rate', 'b1']
    """
    if not isinstance(plan, BatchPlan):
        raise TypeError(f"plan must be a BatchPlan, got {plan!r}.")
    plt = _pyplot()
    from matplotlib.ticker import EngFormatter

    names = [] if plan.run is None else shown_numbers(plan.run)
    schedules = {name.replace("_", " "): getattr(plan, name) for name in names}
    rows = 1 + len(schedules)
    if axes is None:
        size = (6, 1 + 1.5 * rows)
        _, grid = plt.subplots(rows, sharex=True, squeeze=False, figsize=size, layout="constrained")
        axes = list(grid[:, 0])
    if len(axes) != rows:
        raise ValueError(f"axes must be {rows} for this plan, got {len(axes)}.")
    steps = telling_steps(plan, 4000)
    each = plan.sequence_length or 1
    seen = [plan.examples_at(step) * each for step in steps]
    ends = [*seen, plan.examples_at(plan.total_steps) * each]  # the last step has a width, too
    batches = [plan.batch_size(step) for step in (*steps, steps[-1])]
    axes[0].step(ends, batches, where="post", color=COLOURS[0])
    axes[0].set(yscale="log", ylabel="batch size")
    sizes = sorted({stage.batch_size for stage in plan.stages})
    axes[0].set_yticks(sizes, [f"{size:,}" for size in sizes])
    axes[0].minorticks_off()
    for ax, (name, schedule) in zip(axes[1:], schedules.items(), strict=True):
        values = jax.vmap(schedule)(jnp.asarray(steps))
        ax.plot(seen, np.asarray(values), color=COLOURS[0])
        ax.set(ylabel=name, ylim=(0, None))
    axes[-1].set_xlabel("examples seen" if plan.sequence_length is None else "tokens seen")
    axes[-1].xaxis.set_major_formatter(EngFormatter(sep=""))
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25, linewidth=0.6)
    return axes


def _pyplot() -> Any:
    try:
        from matplotlib import pyplot
    except ImportError:
        raise ImportError(
            "plots are drawn with matplotlib, which is not installed: pip install matplotlib"
        ) from None
    return pyplot


def _rows(history: Mapping[str, Any]) -> tuple[list[str], np.ndarray]:
    """A row for each block with its name: `dense`, and for stacked layers `dense[0]`, ..."""
    names = []
    rows = []
    for name, values in history.items():
        array = np.asarray(values, dtype=float)
        if array.ndim == 0:
            raise ValueError(
                f"history must hold an array of shape (times,) for {name!r}, got a single ratio."
            )
        for index in np.ndindex(array.shape[1:]):
            names.append(name + (f"[{', '.join(map(str, index))}]" if index else ""))
            rows.append(array[(slice(None), *index)])
    lengths = sorted({len(row) for row in rows})
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(f"history must hold arrays of one length, 1 or more, got {lengths}.")
    return names, np.stack(rows)


def _shortened(name: str) -> str:
    """A long name without its middle, because both ends say which layer it is."""
    if len(name) <= LONGEST_NAME:
        return name
    half = (LONGEST_NAME - 1) // 2
    return f"{name[:half]}…{name[-half:]}"
