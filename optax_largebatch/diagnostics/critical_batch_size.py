"""The critical batch size, fitted to runs that reached the same target, and growth within it."""

from collections.abc import Mapping, Sequence
import math
from typing import Any, NamedTuple

import numpy as np

from optax_largebatch.arguments import check_number, known_number
from optax_largebatch.diagnostics.noise_scale import NoiseScale, student_quantile
from optax_largebatch.plans.counts import Count, count
from optax_largebatch.plans.growth import Growth
from optax_largebatch.plans.stages import Start


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

    If the runs of all batch sizes vary equally and log-normally, the interval holds the truth in
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
    batches = different_sizes(batch_sizes)
    of_batches = list(steps) if np.iterable(steps) else []
    if len(of_batches) != len(batches):
        raise ValueError(
            f"steps must have one entry for each of the {len(batches)} batch sizes, got {steps!r}."
        )
    runs = [_positive(f"steps[{i}]", np.atleast_1d(x)) for i, x in enumerate(of_batches)]

    log_means = np.array([np.log(x).mean() for x in runs])
    critical, minimum = _least_squares(batches, log_means)
    low, high = _searched(batches)
    if not low * 1.01 < critical < high / 1.01:
        bend = "fall as 1 / batch size throughout"
        sizes = "larger"
        if critical < high / 2:
            bend = "hardly fall"
            sizes = "smaller"
        raise ValueError(
            "steps must bend between the smallest and the largest of batch_sizes, got steps that "
            f"{bend}: no critical batch size between {low:.3g} and {high:.3g} fits best. Add "
            f"{sizes} batch sizes."
        )
    residuals = log_means - np.log(minimum * (1 + critical / batches))
    interval = _interval(batches, runs, log_means, critical)
    return CriticalBatchSize(critical, minimum, interval, tuple(residuals.tolist()))


def _least_squares(
    batches: np.ndarray,
    log_steps: np.ndarray,
) -> tuple[float, float]:
    """The critical batch size and the minimum steps that fit best.

    Given the critical batch size, the best minimum is the mean of the rest. So only one dimension
    is searched: by a grid in the logarithm, which is refined around the best point several times.
    """
    low, high = np.log(_searched(batches))
    for _ in range(10):
        grid = np.linspace(low, high, 33)
        rest = log_steps - np.log1p(np.exp(grid)[:, None] / batches)
        best = int(np.argmin(np.var(rest, axis=1)))
        low = grid[max(best - 1, 0)]
        high = grid[min(best + 1, 32)]
    critical = np.exp((low + high) / 2)
    return float(critical), float(np.exp(np.mean(log_steps - np.log1p(critical / batches))))


def _interval(
    batches: np.ndarray,
    runs: list[np.ndarray],
    log_means: np.ndarray,
    critical: float,
) -> tuple[float, float] | None:
    """The batch sizes that a test of the slope does not reject; see `fit_critical_batch_size`.

    The slope is a weighted sum of the means, so its noise is known exactly for any curve.
    """
    counts = np.array([x.size for x in runs])
    freedom = int(np.sum(counts - 1))
    if not freedom:
        return None
    noise = np.sqrt(sum(np.sum(np.square(x - x.mean())) for x in map(np.log, runs)) / freedom)
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
        points = np.linspace(np.log(critical), np.log(beyond), 501)
        last = max(np.flatnonzero(held(points)), default=0)
        if last == len(points) - 1:
            return unbounded
        inside = points[last]
        outside = points[last + 1]
        for _ in range(50):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if held(middle) else (inside, middle)
        return float(np.exp(inside))

    low, high = _searched(batches)
    return end(low, 0.0), end(high, np.inf)


def _searched(batches: np.ndarray) -> tuple[float, float]:
    """The range to search: beyond it, the data cannot tell the curve from a straight line."""
    return float(batches.min() / 1000), float(batches.max() * 1000)


def different_sizes(batch_sizes: Any) -> np.ndarray:
    """The argument `batch_sizes`, checked: three different ones or more, positive."""
    batches = _positive("batch_sizes", batch_sizes)
    if len(set(batches)) < 3:
        raise ValueError(f"batch_sizes must hold 3 or more different sizes, got {batch_sizes!r}.")
    return batches


def _positive(name: str, values: Any) -> np.ndarray:
    try:
        array = np.asarray(values, dtype=float)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must hold numbers, got {values!r}.") from None
    if array.ndim != 1 or not array.size or not np.all((array > 0) & np.isfinite(array)):
        raise ValueError(f"{name} must hold positive numbers, at least one, got {values!r}.")
    return array


def within_critical_batch_size(
    measured: Mapping[Count, Any],
    *,
    batch_size: Count,
    largest_batch: Count,
    times: float = 1.0,
) -> Growth:
    r"""Doubles the batch where the critical batch size, as measured, allows it.

    The critical batch size is small in the first steps of a run and grows. Measure it at a few
    places of a run, by `measure_critical_batch_size` or `fit_critical_batch_size`. From each place
    :math:`x_i` on, the batch is the largest :math:`B_0 2^j` with

    .. math:: B_0 2^j \le c\, B_{crit}(x_i)

    and no less than before. Nothing is assumed between the places, so the batch follows late rather
    than early.

    Args:
        measured: the critical batch size, in examples, by the place where it was measured: the
            examples seen (or tokens, in a plan that counts tokens). Each is a number, the result of
            `fit_critical_batch_size`, or a `noise_scale`, which is a hint alone; the plan says so.
        batch_size: :math:`B_0`, examples in a step at the beginning, 1 or more.
        largest_batch: the batch size that ends the growth.
        times: :math:`c`, how far above the critical batch size to go. At 1, a run takes twice the
            least examples and twice the least steps; above 1 it takes more examples to save steps.

    Returns:
        A rule for the `stages` of `batch_plan`.

    Raises:
        ValueError: an argument is out of its range, or nothing was measured.

    Examples:
        >>> from optax_largebatch import batch_plan, within_critical_batch_size
        >>> growth = within_critical_batch_size(
        ...     {100_000: 900, 400_000: 2500, "1M": 3000}, batch_size=256, largest_batch=4096)
        >>> print(batch_plan(growth, total="2M"))
        from  batch  examples
        step   size      seen
           0    256         0
         391    512    100.1k
         977   2048    400.1k
        1759 steps for 2M examples; a constant batch of 256 takes 7813.
        Stages: within 1 x the critical batch size, measured at 3 places.
        2M examples: at best 1x the time on the same devices, 0.525x on 2x as many,
        0.225x on 8x as many.

    References:
        Merrill et al., *Critical Batch Size Revisited: A Simple Empirical Approach to Large-Batch
        Language Model Training*, arXiv 2505.23971.
    """
    first = count("batch_size", batch_size, at_least=1)
    largest = count("largest_batch", largest_batch, at_least=first)
    check_number("times", times, "(0, inf)")
    if not isinstance(measured, Mapping) or not measured:
        raise ValueError(
            f"measured must be a dict {{examples seen: critical batch size}}, got {measured!r}."
        )
    critical = {count("measured, a place,", x): _examples(x, y) for x, y in measured.items()}

    def starts(total: int, _: Any) -> list[Start]:
        batches = {0: first}
        for place in sorted(x for x in critical if x < total):
            allowed = min(times * critical[place], largest)
            grown = first * 2 ** math.floor(math.log2(max(allowed / first, 1)))
            if grown > max(batches.values()):
                batches[place] = grown
        return [*batches.items()]

    places = "1 place" if len(critical) == 1 else f"{len(critical)} places"
    note = f"within {times:g} x the critical batch size, measured at {places}"
    if any(isinstance(x, NoiseScale) for x in measured.values()):
        note += " (noise scales are a hint alone)"
    return Growth(note, starts)


def _examples(place: Any, measured: Any) -> float:
    """The number of examples in one entry of `measured`."""
    if isinstance(measured, CriticalBatchSize):
        measured = measured.critical_batch_size
    elif isinstance(measured, NoiseScale):
        measured = measured.noise_scale
    return known_number(f"measured[{place!r}]", measured, "(0, inf]")
