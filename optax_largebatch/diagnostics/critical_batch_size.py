"""The critical batch size, fitted to runs that reached the same target at several batch sizes."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from optax_largebatch.diagnostics.student import student_quantile


class CriticalBatchSize(NamedTuple):
    """The result of `fit_critical_batch_size`."""

    critical_batch_size: float
    """The batch size that needs twice the least possible steps and twice the least possible
    examples."""
    minimum_steps: float
    """The least steps to the target, which no batch size can save."""
    interval: tuple[float, float] | None
    """The 90% confidence interval of the critical batch size, for the noise of single runs; None
    where no batch size has several runs, and 0 or infinity where the runs do not bound it."""
    residuals: tuple[float, ...]
    """The logarithm of the measured over the fitted steps, for each batch size."""

    @property
    def minimum_examples(self) -> float:
        """The least examples to the target, which a small batch size needs."""
        return self.minimum_steps * self.critical_batch_size

    @property
    def residual(self) -> float:
        """The root mean square of the residuals: 0.05 is about 5%."""
        return float(np.sqrt(np.mean(np.square(self.residuals))))

    def steps(self, batch_size: float) -> float:
        """The steps to the target at a batch size, according to the fit."""
        return self.minimum_steps * (1 + self.critical_batch_size / batch_size)


def fit_critical_batch_size(
    batch_sizes: Sequence[float],
    steps: Sequence[float | Sequence[float]],
) -> CriticalBatchSize:
    r"""Fits the steps to a target as a function of the batch size.

    .. math:: S(B) = S_{min} \left(1 + \frac{B_{crit}}{B}\right)

    Well below :math:`B_{crit}`, twice the batch size takes half the steps; well above it, the same
    number. The fit is by least squares in :math:`\log S`. Several runs of a batch size count as
    the mean of their :math:`\log S`. Unlike the logarithm of their mean, it is not higher where
    there are more runs, and one slow run moves it less.

    The interval holds the batch sizes at which the slope of the squared error is no further from 0
    than the noise of the runs explains. With :math:`n_i` runs of batch size :math:`B_i`, their mean
    :math:`y_i` of :math:`\log S`, and :math:`s^2` the variance of single runs within the batch
    sizes, which has :math:`\nu = \sum_i (n_i - 1)` degrees of freedom, these are the :math:`B` with

    .. math::

        \Bigl|\sum_i h_i \bigl(y_i - \log(1 + B / B_i)\bigr)\Bigr|
            \le t_{0.95, \nu}\, s \sqrt{\textstyle\sum_i h_i^2 / n_i}, \qquad
        h_i = d_i - \bar d, \quad d_i = \frac{B}{B + B_i}.

    If the runs of all batch sizes vary alike and log-normally, the interval holds the true value in
    90 of 100 cases, however few the runs are. It covers other runs with the same settings, not the
    quality of these settings. If every batch size has settings of its own, their quality moves the
    fit more than the noise of single runs does. Look at the residuals as well.

    Args:
        batch_sizes: at least three different batch sizes, positive.
        steps: the steps to the target for each batch size, of one run or of several; positive.

    Returns:
        The fit: `critical_batch_size`, `minimum_steps`, `interval`, `residuals`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range, or the steps do not bend: they fall as
            :math:`1 / B` throughout, or not at all, so that there is no critical batch size to fit.

    Examples:
        >>> from optax_largebatch import fit_critical_batch_size
        >>> fit = fit_critical_batch_size([256, 1024, 4096], [5000.0, 2000.0, 1250.0])
        >>> print(round(fit.critical_batch_size), round(fit.minimum_steps))
        1024 1000

    References:
        McCandlish et al., *An Empirical Model of Large-Batch Training*, arXiv 1812.06162.
    """
    batches = _positive("batch_sizes", batch_sizes)
    if len(set(batches)) < 3:
        raise ValueError(
            f"batch_sizes must hold at least three different sizes, got {list(batch_sizes)!r}: "
            f"every curve fits two."
        )
    if len(steps) != len(batches):
        raise ValueError(
            f"steps must have one entry for each of the {len(batches)} batch sizes, got "
            f"{len(steps)}."
        )
    runs = [_positive(f"steps[{i}]", np.atleast_1d(own)) for i, own in enumerate(steps)]

    log_means = np.array([np.log(own).mean() for own in runs])
    (critical,), (minimum,) = _least_squares(batches, log_means[None])
    low, high = _searched(batches)
    if not low * 1.01 < critical < high / 1.01:
        raise ValueError(
            f"steps must bend between the smallest and the largest of batch_sizes, got steps that "
            f"{'hardly fall' if critical < high / 2 else 'fall as 1 / batch size throughout'}: no "
            f"critical batch size between {low:.3g} and {high:.3g} fits best. Add "
            f"{'smaller' if critical < high / 2 else 'larger'} batch sizes."
        )
    residuals = log_means - np.log(minimum * (1 + critical / batches))
    interval = _interval(batches, runs, log_means, float(critical))
    return CriticalBatchSize(float(critical), float(minimum), interval, tuple(residuals.tolist()))


def _least_squares(batches: np.ndarray, log_steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The critical batch size and the minimum steps that fit each row of `log_steps`.

    Given the critical batch size, the best minimum is the mean of the rest. So only one dimension
    is searched: by a grid in the logarithm, which is refined around the best point several times.
    """
    low, high = (np.full(len(log_steps), np.log(end)) for end in _searched(batches))
    for _ in range(10):
        grid = np.linspace(low, high, 33, axis=1)
        left = log_steps[:, None, :] - np.log1p(np.exp(grid)[:, :, None] / batches)
        best = np.argmin(np.var(left, axis=2), axis=1)
        rows = np.arange(len(grid))
        low, high = grid[rows, np.maximum(best - 1, 0)], grid[rows, np.minimum(best + 1, 32)]
    critical = np.exp((low + high) / 2)
    left = log_steps - np.log1p(critical[:, None] / batches)
    return critical, np.exp(left.mean(axis=1))


def _interval(
    batches: np.ndarray, runs: list[np.ndarray], log_means: np.ndarray, critical: float
) -> tuple[float, float] | None:
    """The batch sizes that a test of the slope does not reject; see `fit_critical_batch_size`.

    The slope is a weighted sum of the means, so its noise is known exactly for any curve.
    """
    counts = np.array([own.size for own in runs])
    freedom = int(np.sum(counts - 1))
    if freedom == 0:
        return None
    logs = [np.log(own) for own in runs]
    noise = np.sqrt(sum(np.sum(np.square(own - own.mean())) for own in logs) / freedom)
    allowed = float(student_quantile(0.95, freedom)) * noise

    def held(point: np.ndarray) -> np.ndarray:
        """Whether the logarithms of batch sizes are in the interval."""
        ratio = np.exp(point)[..., None] / batches
        share = ratio / (1 + ratio)
        weights = share - share.mean(axis=-1, keepdims=True)
        slope = np.sum(weights * (log_means - np.log1p(ratio)), axis=-1)
        return np.abs(slope) <= allowed * np.sqrt(np.sum(np.square(weights) / counts, axis=-1))

    def end(beyond: float, unbounded: float) -> float:
        """The last batch size in the interval, on the way from the fit outwards."""
        way = np.linspace(np.log(critical), np.log(beyond), 501)
        found = held(way)
        found[0] = True
        last = int(np.flatnonzero(found)[-1])
        if last == len(way) - 1:
            return unbounded
        inside, outside = way[last], way[last + 1]
        for _ in range(50):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if held(middle) else (inside, middle)
        return float(np.exp(inside))

    low, high = _searched(batches)
    return end(low, 0.0), end(high, np.inf)


def _searched(batches: np.ndarray) -> tuple[float, float]:
    """The range to search: beyond it, the data cannot tell the curve from a straight line."""
    return float(batches.min() / 1000), float(batches.max() * 1000)


def _positive(name: str, values: Sequence[float] | np.ndarray) -> np.ndarray:
    try:
        array = np.asarray(values, dtype=float)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must hold numbers, got {values!r}.") from None
    if array.ndim != 1 or array.size == 0 or not np.all((array > 0) & np.isfinite(array)):
        raise ValueError(f"{name} must hold positive numbers, at least one, got {values!r}.")
    return array
