"""Batches that grow with the run by a rule, in place of stages that are listed."""

import bisect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_largebatch.plans.counts import Count, count
from optax_largebatch.plans.stages import Start

LOOKED_AT = 4096
"""The points of a schedule at which it is looked for a halving, before the place is narrowed."""


class Growth(NamedTuple):
    """A rule for the stages of a `batch_plan`, such as `seesaw(...)`."""

    note: str
    """Where the stages come from, in words; the printed plan has it."""
    starts: Callable[[int, Any], Sequence[Start]]
    """From the length of the run and its learning rate to the starts of the stages."""
    is_coupled: bool = False
    """Whether the learning rate has to follow the batch size."""


def seesaw(batch_size: Count, *, largest_batch: Count) -> Growth:
    r"""Doubles the batch each time that the learning rate of the plan would have halved.

    With :math:`S` the learning rate that the plan is given, :math:`S_{max}` its peak, and
    :math:`B_0` the first batch size:

    .. math:: B(x) = B_0\, 2^j, \qquad S(x) \le S_{max} / 2^j \text{ for the first time since the
        peak}

    Between these places the rate follows the schedule. At each of them it rises by
    :math:`\sqrt 2`, since a plan couples it to the root of the batch size: in all it has fallen by
    :math:`\sqrt 2` while the batch has doubled. For an optimizer that normalises the gradient,
    and as long as noise outweighs the gradient, each example then moves the parameters as far as
    with the constant batch and the whole decay. The run takes fewer steps: 67% of them for a decay
    to 0 that is linear, with `largest_batch` eight times the first batch size. A small BERT lost 1%
    by it. The rate stays high for more of the steps, so lower one that is at the edge of what is
    stable.

    Args:
        batch_size: :math:`B_0`, examples in a step at the beginning, 1 or more.
        largest_batch: the batch size that ends the growth; the rate then follows the schedule. Give
            the critical batch size, or less: beyond it examples are wasted.

    Returns:
        A rule for the `stages` of `batch_plan`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range.

    Examples:
        >>> from optax_largebatch import PlannedRate, TunedRun, batch_plan, seesaw
        >>> run = TunedRun(
        ...     "adamw", batch_size=500, total="1M",
        ...     learning_rate=PlannedRate(1e-3, decay="linear"))
        >>> plan = batch_plan(seesaw(500, largest_batch=2000), total="1M", run=run)
        >>> print([stage.batch_size for stage in plan.stages], plan.total_steps)
        [500, 1000, 2000] 1375

    References:
        Meterez et al., *Seesaw: Accelerating Training by Balancing Learning Rate and Batch Size
        Scheduling*, arXiv 2510.14717.
    """
    first = count("batch_size", batch_size, at_least=1)
    largest = count("largest_batch", largest_batch, at_least=first)

    def starts(total: int, learning_rate: Any) -> list[Start]:
        if not callable(learning_rate):
            raise ValueError(
                "learning_rate must be a schedule of the examples seen for seesaw, which doubles "
                f"the batch where it halves; got {learning_rate!r}. Pass "
                "run=TunedRun(..., learning_rate=PlannedRate(...)) to batch_plan."
            )
        places = _halvings(learning_rate, total, (largest // first).bit_length() - 1)
        # A schedule of stairs may fall to a quarter at once: of two doublings in one place the
        # second counts.
        grown = {seen: first * 2 ** (j + 1) for j, seen in enumerate(places)}
        return [(0, first), *grown.items()]

    return Growth(f"Seesaw from {first}, at most {largest}", starts, is_coupled=True)


def _halvings(schedule: Any, total: int, most: int) -> list[int]:
    """The first places since its peak at which a schedule is at most 1/2, 1/4, ... of it."""
    grid, rates = _looked_at(schedule, 0, total)
    peak = int(np.argmax(rates))
    if not rates[peak] > 0:
        raise ValueError(
            "learning_rate must be a number throughout and above 0 somewhere for seesaw; it is at "
            f"most {rates[peak]}."
        )
    # After a short warm-up the peak may lie between two points of the grid.
    _, nearby = _looked_at(schedule, grid[max(peak - 1, 0)], grid[min(peak + 1, len(grid) - 1)])
    highest = max(rates[peak], nearby.max())
    places: list[int] = []
    for limit in (highest / 2**j for j in range(1, most + 1)):
        low_enough = rates[peak:] <= limit
        if not low_enough.any():
            break
        right = peak + int(np.argmax(low_enough))
        place = bisect.bisect_left(
            range(total),
            True,
            lo=int(grid[right - 1]) + 1 if right else 0,
            hi=int(grid[right]),
            key=lambda seen: float(schedule(jnp.asarray(seen, float))) <= limit,
        )
        if place >= total:
            break
        places.append(place)
    return places


def _looked_at(
    schedule: Any,
    first: int,
    last: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Some places from the first to the last, and the schedule there."""
    grid = np.linspace(first, last, LOOKED_AT + 1).astype(np.int64)
    rates = np.asarray(jax.vmap(schedule)(jnp.asarray(grid, float)))
    if rates.shape != grid.shape:
        raise ValueError(
            f"learning_rate: the schedule must return one number, got the shape {rates.shape[1:]}."
        )
    return grid, rates
