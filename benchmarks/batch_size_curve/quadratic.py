r"""The noisy quadratic, whose expected loss is known exactly: nothing is drawn.

.. math:: L(w) = \tfrac12 \sum_i h_i w_i^2, \qquad g_i = h_i w_i + \sqrt{c\, h_i / B}\; \xi_i

with :math:`h_i = 1 / i`, as in Zhang et al., *Which Algorithmic Choices Matter at Which Batch
Sizes?*, arXiv 1907.04164. A step of SGD, with or without momentum, is linear, so that the second
moments of weight and momentum in every coordinate obey a linear recursion, which is run in place of
training. The steps of the other optimizers are not: their moments are not closed and could only be
sampled, so they are not in this workload.
"""

from collections.abc import Iterator
import math

import numpy as np
from scipy.optimize import brentq, minimize_scalar

from benchmarks.batch_size_curve.search import Settings
from benchmarks.batch_size_curve.training import Outcome, Run

CURVATURES = 1 / np.arange(1.0, 101.0)
START = 0.5 * CURVATURES.sum()  # the loss of weights of 1
NOISE = 2.0  # the constant c
MOST_STEPS = 20_000
MOMENTA = {"plain sgd": 0.0, "sgd": 0.9}
CENTRES = {"plain sgd": 0.1, "sgd": 0.06}


def prepare(target: float, optimizer: str) -> Run:
    """The trials of an optimizer. There is no warm-up, no weight decay and no seed."""

    def run(settings: Settings, seed: int, batch_size: float, most_steps: float) -> Outcome:
        last = min(most_steps, MOST_STEPS)
        losses = expected_losses(settings.learning_rate, MOMENTA[optimizer], batch_size)
        for step, loss in enumerate(losses, start=1):
            if loss <= target:
                return Outcome(step, "reached", loss, loss)
            if loss > 1e6:
                return Outcome(np.inf, "diverged", loss, loss)
            if step >= last:
                break
        ended = "censored" if last < MOST_STEPS else "out of steps"
        return Outcome(np.inf, ended, loss, loss)

    return run


def expected_losses(rate: float, momentum: float, batch_size: float) -> Iterator[float]:
    """The expected loss after each step, from weights of 1."""
    # w' = a w + b m + n s, m' = h w + momentum m + s, with a gradient of h w + s
    a, b, n = 1 - rate * CURVATURES * (1 + momentum), -rate * momentum**2, -rate * (1 + momentum)
    variance = NOISE * CURVATURES / batch_size
    ww, wm, mm = np.ones_like(CURVATURES), np.zeros_like(CURVATURES), np.zeros_like(CURVATURES)
    while True:
        ww, wm, mm = (
            a * (a * ww + 2 * b * wm) + b**2 * mm + n**2 * variance,
            CURVATURES * (a * ww + b * wm) + momentum * (a * wm + b * mm) + n * variance,
            CURVATURES * (CURVATURES * ww + 2 * momentum * wm) + momentum**2 * mm + variance,
        )
        yield 0.5 * float(CURVATURES @ ww)


def exact_fit(target: float) -> dict[str, tuple[float, float]]:
    """S_min and B_crit of SGD without momentum: the least steps, and the least examples over them.

    They are the limits of the curve, each with its best learning rate.
    """
    steps = least_steps(target)
    return {"plain sgd": (steps, least_examples(target) / steps)}


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
    found = minimize_scalar(examples, bounds=(largest - 7, largest - 1e-3), method="bounded")
    return float(found.fun)


def least_steps(target: float) -> float:
    """Steps to the target without noise, at the best rate; a fraction of a step counts as one."""

    def steps(rate: float) -> float:
        def above(step: float) -> float:
            squares = np.square(1 - rate * CURVATURES) ** step
            return 0.5 * float(CURVATURES @ squares) - target

        return float(brentq(above, 0, 1e6))

    return float(minimize_scalar(steps, bounds=(1.01, 1.99), method="bounded").fun)
