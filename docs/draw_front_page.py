"""Draws the picture of the front page: layers in a stack, and a law beside a search.

python -m docs.draw_front_page
"""

from pathlib import Path

import jax
import jax.numpy as jnp
from matplotlib.axes import Axes
from matplotlib.figure import Figure
import numpy as np
import optax

from benchmarks.harness.colours import INK
from benchmarks.transfer import committed_rows
from benchmarks.tuned.results import measured
from benchmarks.tuned.sweep import committed
from benchmarks.tuned.workloads import BERT
import optax_largebatch as lb
from optax_largebatch.diagnostics.plots import COLOURS

PICTURE = Path(__file__).parent / "static" / "front_page.png"
RATIOS = (0.62, 1.14, 1.66, 2.26, 2.08, 3.49, 4.73, 6.85)
"""The trust ratios within one stack, at the worst moment of the runs of "Stacked layers"."""
SMALL, LARGE = "32", "2048"


def steps_of_layers(optimizer: optax.GradientTransformation) -> np.ndarray:
    """The step of each layer of a stack, over its step in an array of its own."""
    kernels = jax.random.normal(jax.random.key(0), (len(RATIOS), 64, 64))
    kernels *= (jnp.array(RATIOS) / jnp.sqrt(jnp.mean(kernels**2, axis=(1, 2))))[:, None, None]
    gradients = jax.random.normal(jax.random.key(1), kernels.shape)

    @jax.jit
    def step(params: jax.Array, gradients: jax.Array) -> jax.Array:
        return optimizer.update(gradients, optimizer.init(params), params)[0]

    norms = [jnp.linalg.norm(x, axis=(-2, -1)) for x in (step(kernels, gradients), kernels)]
    return np.asarray(norms[0] / norms[1] / 0.1)


def draw_stacks(axis: Axes) -> None:
    """A dot for each layer, of an optimizer that knows nothing of stacks and of ours."""
    layers = np.arange(1, len(RATIOS) + 1)
    ours = lb.lamb(0.1, stacked=lb.stacked_layers(lambda params: 0))
    axis.axhline(1, color=INK, linewidth=0.8)
    for name, optimizer, colour in (
        ("optax.lamb: one norm for all", optax.lamb(0.1), COLOURS[1]),
        ("lamb(stacked=...)", ours, COLOURS[0]),
    ):
        axis.plot(layers, steps_of_layers(optimizer), "o-", color=colour, label=name)
    axis.set(yscale="log", xticks=layers, xlabel="layer", ylabel="step, over the right one")
    axis.set_yticks([0.5, 1, 2, 4], ["0.5", "1", "2", "4"])
    axis.minorticks_off()
    axis.set_title("Eight scanned layers in one array", loc="left")
    axis.legend(frameon=False)


def draw_law(axis: Axes) -> None:
    """For each optimizer the loss at a batch 64 times as large, by several ways to get there."""
    searched = measured(BERT, committed(BERT))
    rows = [
        row
        for row in committed_rows()
        if (row.workload, row.small, row.large) == (BERT.name, SMALL, LARGE)
    ]
    names = list(dict.fromkeys(row.optimizer for row in rows))
    ways = {"kept": "settings kept", "sqrt": "root of the batch", "law": "our law"}
    for (way, label), colour in zip(ways.items(), ("#999999", COLOURS[1], COLOURS[0]), strict=True):
        means = [
            np.mean([x.test_loss for x in rows if (x.optimizer, x.way) == (name, way)])
            for name in names
        ]
        axis.plot(means, range(len(names)), "o", color=colour, label=label)
    means = [searched[name][LARGE].mean for name in names]
    axis.plot(means, range(len(names)), "|", color=INK, markersize=14, label="a search there")
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.set_xlabel("test loss, lower is better")
    axis.set_title(f"Small BERT, batch {SMALL} to {LARGE}, no search", loc="left")
    axis.legend(frameon=False)


def draw() -> Figure:
    """Both, one above the other, so that a telephone shows them."""
    figure = Figure(figsize=(4.6, 5.6), layout="constrained")
    above, below = figure.subplots(2)
    draw_stacks(above)
    draw_law(below)
    return figure


if __name__ == "__main__":
    draw().savefig(PICTURE)
