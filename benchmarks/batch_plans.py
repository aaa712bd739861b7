r"""Seesaw against a constant batch, on the noisy quadratic whose expected loss is known exactly.

    python -m benchmarks.batch_plans --output benchmarks/results

Every run sees 50,000 examples, by a `batch_plan` whose batch size and rate are taken step by step.
Seesaw grows the batch 8 times. Beside it are the constant batch that it begins with, and a constant
batch that takes as many steps as Seesaw. The peak rate of a constant batch is the best of a grid;
Seesaw has that of the first of the two and, for comparison, its own best. The quadratic is

.. math:: L(w) = \tfrac12 \sum_i h_i w_i^2, \qquad g_i = h_i w_i + \sqrt{c\, h_i / B}\; \xi_i

with :math:`h_i = 1 / i` (Zhang et al., arXiv 1907.04164). A step of SGD is linear, so the second
moments of the weights obey a recursion, which is run in place of training: nothing is drawn.
Normalised SGD divides the gradient by the root of the mean of its squared norm, as Seesaw's
derivation has it (arXiv 2510.14717). Writes `batch_plans.csv`. Takes a minute, and
gives the same everywhere.
"""

import argparse
from collections.abc import Sequence
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import brentq, minimize_scalar

from benchmarks.harness.results import add_output, write_csv
import optax_largebatch as lb

NAME = "batch_plans"
CURVATURES = 1 / np.arange(1.0, 101.0)
START = 0.5 * CURVATURES.sum()  # the loss of weights of 1
NOISE = 2.0  # the constant c
EXAMPLES = 50_000
BATCH_SIZES = (16, 64, 256, 1024, 4096)
GROWTH = 8
PEAKS = tuple(2.0 ** (power / 8) for power in range(-24, 41))
LAWS = {"normalised SGD": "sqrt", "SGD": "sgd"}
DECAYS = ("linear", "cosine")


class Row(NamedTuple):
    """An optimizer, the decay of its rate and a first batch size."""

    optimizer: str
    decay: str
    batch_size: int
    largest_batch: int
    critical_batch_size: float
    """That of plain SGD, to the loss at which the smallest constant batch ends."""
    peak_rate: float
    """The best of the constant batch; Seesaw has it too."""
    steps: int
    seesaw_steps: int
    loss: float
    """The loss at the end of the constant batch."""
    seesaw_loss: float
    seesaw_best_loss: float
    """The loss at the end of Seesaw, with the peak rate that is best for Seesaw."""
    same_steps_loss: float
    """The loss at the end of the constant batch that takes as many steps as Seesaw."""


def plans(batch_size: int, optimizer: str, decay: Any, stages: Any = None) -> list[lb.BatchPlan]:
    """A plan for each peak rate of the grid, constant or with stages from a batch size on."""
    return [
        lb.batch_plan(
            stages or batch_size,
            total=EXAMPLES,
            run=lb.TunedRun(
                "sgd",
                batch_size=batch_size,
                total=EXAMPLES,
                learning_rate=lb.PlannedRate(peak, decay=decay),
            ),
            law=LAWS[optimizer],
        )
        for peak in PEAKS
    ]


def final_losses(plans: Sequence[lb.BatchPlan], normalised: bool) -> np.ndarray:
    """The expected loss at the end of each of these plans, which differ in their rates alone.

    It is infinite where the run has diverged: where it ends above the loss that it began with.
    """
    (total_steps,) = {plan.total_steps for plan in plans}
    steps = jnp.arange(EXAMPLES // min(BATCH_SIZES) + 1)  # of one shape: JAX compiles once
    batch_sizes = np.asarray(plans[0].batch_size(steps))[:total_steps]
    rates = np.stack([plan.learning_rate(steps) for plan in plans], axis=1)[:total_steps]
    squares = np.ones((len(plans), len(CURVATURES)))  # the means of the squared weights
    with np.errstate(over="ignore", invalid="ignore"):
        for batch_size, rate in zip(batch_sizes, rates[:, :, None], strict=True):
            variance = NOISE * CURVATURES / batch_size
            if normalised:
                rate = rate / np.sqrt((CURVATURES**2 * squares + variance).sum(1, keepdims=True))
            squares = (1 - rate * CURVATURES) ** 2 * squares + rate**2 * variance
        losses = 0.5 * squares @ CURVATURES
    return np.where(losses < START, losses, np.inf)


def critical_batch_size(target: float) -> float:
    """The least examples to a loss over the least steps to it, of SGD without momentum."""
    return least_examples(target) / least_steps(target)


def least_examples(target: float) -> float:
    """Examples to the target, with a batch and a rate that go to 0 together, at the best ratio.

    Then a step is a moment, and each coordinate decays exponentially to its share of the noise.
    """

    def examples(log_ratio: float) -> float:
        ratio = math.exp(log_ratio)  # of learning rate to batch size
        rest = ratio * NOISE / 2  # of the squared weights

        def above(seen: float) -> float:
            squares = rest + (1 - rest) * np.exp(-2 * ratio * CURVATURES * seen)
            return 0.5 * float(CURVATURES @ squares) - target

        return float(brentq(above, 0, 1e6 / ratio))

    largest = math.log(2 * target / NOISE / START)  # where the noise alone is at the target
    return float(
        minimize_scalar(examples, bounds=(largest - 7, largest - 1e-3), method="bounded").fun
    )


def least_steps(target: float) -> float:
    """Steps to the target without noise, at the best rate; a fraction of a step counts as one."""

    def steps(rate: float) -> float:
        def above(step: float) -> float:
            squares = np.square(1 - rate * CURVATURES) ** step
            return 0.5 * float(CURVATURES @ squares) - target

        return float(brentq(above, 0, 1e6))

    return float(minimize_scalar(steps, bounds=(1.01, 1.99), method="bounded").fun)


def compared() -> list[Row]:
    """All rows of the table."""
    rows = []
    for optimizer, decay in itertools.product(LAWS, DECAYS):
        constant = {batch: _run(batch, optimizer, decay) for batch in BATCH_SIZES}
        critical = critical_batch_size(constant[min(BATCH_SIZES)][1].min())
        for batch_size, (steps, losses) in constant.items():
            largest = GROWTH * batch_size
            growth = lb.seesaw(batch_size, largest_batch=largest)
            seesaw_steps, seesaw = _run(batch_size, optimizer, decay, growth)
            _, same_steps = _run(round(EXAMPLES / seesaw_steps), optimizer, decay)
            best = int(losses.argmin())
            rows.append(
                Row(
                    optimizer, decay, batch_size, largest, critical, PEAKS[best], steps,
                    seesaw_steps, losses[best], seesaw[best], seesaw.min(), same_steps.min(),
                )
            )  # fmt: skip
    return rows


def _run(batch_size: int, optimizer: str, decay: str, stages: Any = None) -> tuple[int, np.ndarray]:
    """The steps, and the loss at the end for each peak rate."""
    own = plans(batch_size, optimizer, decay, stages)
    return own[0].total_steps, final_losses(own, optimizer == "normalised SGD")


def main() -> None:
    """Computes everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_output(parser, NAME)
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    rows = compared()
    write_csv(
        [
            {
                name: f"{value:.5g}" if isinstance(value, float) else value
                for name, value in row._asdict().items()
            }
            for row in rows
        ],
        options.output / f"{NAME}.csv",
    )


if __name__ == "__main__":
    main()
