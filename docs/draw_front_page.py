"""Draws the picture of the front page: layers in a stack, and on two networks a law and a search.

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
from benchmarks.transfer import OPTIMIZERS, committed_rows, losses_of, searched
from benchmarks.tuned.results import measured
from benchmarks.tuned.sweep import committed
from benchmarks.tuned.workloads import BERT, CAUSAL, Workload
import optax_largebatch as lb
from optax_largebatch.diagnostics.plots import COLOURS

PICTURE = Path(__file__).parent / "static" / "front_page.png"
RATIOS = (0.62, 1.14, 1.66, 2.26, 2.08, 3.49, 4.73, 6.85)
"""The trust ratios within one stack, at the worst moment of the runs of "Stacked layers"."""
SMALL, LARGE = "32", "2048"
LEGEND = {"frameon": False, "fontsize": "small", "handlelength": 1.2, "columnspacing": 1.2}
WAYS = {"kept": "#999999", "sqrt": COLOURS[1], "law": COLOURS[0]}


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


def draw_law(axis: Axes, workload: Workload, title: str) -> None:
    """For each optimizer the loss at a batch 64 times as large, by several ways to get there."""
    losses = losses_of(committed_rows(), workload)
    searches = measured(workload, committed(workload))
    for line, name in enumerate(OPTIMIZERS):
        place = (workload.name, name, SMALL, LARGE)
        for way, colour in WAYS.items():
            if ends := losses.get((*place, way)):
                axis.plot(np.mean([*ends.values()]), line, "o", color=colour)
        search = np.mean([*searched(losses, place, searches).values()])
        axis.plot(search, line, "|", color=INK, markersize=14)
    axis.set_yticks(range(len(OPTIMIZERS)), OPTIMIZERS)
    axis.set_ylim(len(OPTIMIZERS) - 0.5, -0.5)
    axis.set_title(f"{title}, batch {SMALL} to {LARGE}", loc="left")


def draw() -> Figure:
    """All three, one above the other, so that a telephone shows them."""
    figure = Figure(figsize=(4.6, 7.8), layout="constrained")
    above, below = figure.subfigures(2, height_ratios=(2.8, 5))
    draw_stacks(above.subplots())
    above.legend(loc="outside upper left", ncols=2, **LEGEND)
    axes = below.subplots(2)
    draw_law(axes[0], BERT, "A small BERT")
    draw_law(axes[1], CAUSAL, "A small causal model")
    axes[1].set_xlabel("test loss, lower is better")
    axes[0].plot([], [], "|", color=INK, markersize=14, label="a search there")
    labels = {"kept": "settings kept", "sqrt": "root of the batch", "law": "our law"}
    for way, label in labels.items():
        axes[0].plot([], [], "o", color=WAYS[way], label=label)
    below.legend(loc="outside upper left", ncols=4, **LEGEND)
    return figure


if __name__ == "__main__":
    draw().savefig(PICTURE)
