"""Growth of the batch that stays within the critical batch size, as far as it was measured."""

from collections.abc import Mapping
import math
from typing import Any

from optax_largebatch.arguments import check_number
from optax_largebatch.diagnostics.critical_batch_size import CriticalBatchSize
from optax_largebatch.diagnostics.noise_scale import NoiseScale
from optax_largebatch.plans.counts import Count, count
from optax_largebatch.plans.growth import Growth
from optax_largebatch.plans.stages import Start


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
        TypeError: an argument has the wrong type.
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
        1759 steps for 2M examples.
        A constant batch of 256 takes 7813 steps; the plan 23% of that.
        Stages: within 1 x the critical batch size, measured at 3 places.

    References:
        Merrill et al., *Critical Batch Size Revisited: A Simple Empirical Approach to Large-Batch
        Language Model Training*, arXiv 2505.23971.
    """
    first = count("batch_size", batch_size, at_least=1)
    largest = count("largest_batch", largest_batch, at_least=first)
    check_number("times", times, "(0, inf)")
    if not isinstance(measured, Mapping) or not measured:
        raise ValueError(
            "measured must be a dict with one place or more, {examples seen: critical batch size}; "
            f"got {measured!r}."
        )
    critical = {count("measured, a place,", x): _batch_size(x, own) for x, own in measured.items()}
    hints = any(isinstance(own, NoiseScale) for own in measured.values())

    def starts(total: int, learning_rate: Any) -> list[Start]:
        del learning_rate
        found = {0: first}
        for place in sorted(x for x in critical if x < total):
            allowed = min(times * critical[place], largest)
            grown = first * 2 ** max(0, math.floor(math.log2(allowed / first)))
            if grown > max(found.values()):
                found[place] = grown
        return [*found.items()]

    places = "1 place" if len(critical) == 1 else f"{len(critical)} places"
    note = f"within {times:g} x the critical batch size, measured at {places}"
    if hints:
        note += " (noise scales are a hint alone)"
    return Growth(note, starts)


def _batch_size(place: Any, own: Any) -> float:
    """The number of examples in one entry of `measured`."""
    if isinstance(own, CriticalBatchSize):
        own = own.critical_batch_size
    elif isinstance(own, NoiseScale):
        own = float(own.noise_scale)
    check_number(f"measured[{place!r}]", own, "(0, inf]")
    return float(own)
