"""A learning rate over a run as plain data: warm-up, hold and decay, counted in examples."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from optax_largebatch.arguments import check_choice, check_number, known_number
from optax_largebatch.plans.counts import Count, count
from optax_largebatch.schedules.warmup import SHAPES, warmup_decay


@dataclasses.dataclass(frozen=True)
class PlannedRate:
    r"""A schedule of the examples seen: a linear warm-up, a hold, and a decay to the end.

    .. math::

        \eta(x) = \begin{cases}
            \eta x / W & x < W \\
            \eta & W \le x < W + H \\
            \eta_e + (\eta - \eta_e) f\left(\frac{x - W - H}{N - W - H}\right) & W + H \le x \le N
        \end{cases}

    with a shape :math:`f` of `warmup_decay`.

    It is a schedule like those of optax, and unlike them it is plain data: it compares, it can be
    pickled, and a `BatchPlan` with it can be written as JSON.

    Args:
        peak_value: the largest rate, at the end of the warm-up: that of your recipe at the batch
            size of the first stage. :math:`\eta`, positive, at most 1e10.
        total: :math:`N`, where the decay ends: the examples of the run, or the tokens in a plan
            that counts tokens; an integer, or a string such as `"20M"`. None for the total of the
            plan that it is passed to.
        warmup: the examples (or tokens) over which the rate grows from 0: usually 1 to 10% of the
            run. :math:`W`, 0 or more.
        hold: the examples (or tokens) at the peak between warm-up and decay: 0, or 80 to 90% of the
            run for warm-up, stable, decay (WSD), with `decay="linear"` or `"sqrt"`. :math:`H`, 0 or
            more.
        decay: the shape :math:`f` in which the rate falls: `"linear"`, `"cosine"`, `"sqrt"` or
            `"constant"`.
        end_value: the rate at the end: 0, or a tenth of the peak if the run will be continued.
            :math:`\eta_e`, 0 or more, at most 1e10.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range.

    Examples:
        >>> from optax_largebatch import PlannedRate
        >>> rate = PlannedRate(1e-3, total="10M", warmup="1M", decay="linear")
        >>> print([f"{rate(seen):.6f}" for seen in (0, 500_000, 1_000_000, 5_500_000, 10_000_000)])
        ['0.000000', '0.000500', '0.001000', '0.000500', '0.000000']
        >>> rate = PlannedRate(1e-3, total="10M", warmup="1M", hold="7M", decay="sqrt")
        >>> print([f"{rate(seen):.6f}" for seen in (1_000_000, 8_000_000, 8_500_000, 10_000_000)])
        ['0.001000', '0.001000', '0.000500', '0.000000']
    """

    peak_value: float
    _: dataclasses.KW_ONLY
    total: Count | None = None
    warmup: Count = 0
    hold: Count = 0
    decay: Literal["linear", "cosine", "sqrt", "constant"] = "cosine"
    end_value: float = 0.0

    def __post_init__(self) -> None:
        peak_value = known_number("peak_value", self.peak_value, "(0, 1e10]")
        end_value = known_number("end_value", self.end_value, "[0, 1e10]")
        check_choice("decay", self.decay, tuple(SHAPES))
        # The numbers that are meant, so that plans compare: "1M" equals 1_000_000.
        warmup = count("warmup", self.warmup)
        hold = count("hold", self.hold)
        total = None if self.total is None else count("total", self.total, at_least=1)
        if total is not None and warmup + hold >= total:
            raise ValueError(
                f"warmup + hold must be less than total, {total}; got {warmup} + {hold}."
            )
        rates = {"peak_value": peak_value, "end_value": end_value}
        for name, value in (rates | {"total": total, "warmup": warmup, "hold": hold}).items():
            object.__setattr__(self, name, value)

    def __call__(self, seen: jax.typing.ArrayLike) -> jax.Array:
        """The rate after so many examples (or tokens)."""
        if self.total is None:
            raise ValueError("total must be given to PlannedRate, or to the plan it is passed to.")
        if not isinstance(seen, jax.Array) and not np.ndim(seen):
            check_number("seen", seen, "[0, inf]")
        # Counts of tokens do not fit into 32 bits; a float holds them to seven digits.
        schedule = warmup_decay(
            self.peak_value,
            total_steps=int(self.total),
            decay=self.decay,
            end_value=self.end_value,
            warmup_steps=int(self.warmup),
            hold_steps=int(self.hold),
        )
        return jnp.asarray(schedule(jnp.asarray(seen, float)))


def planned(name: str, value: Any, total: int) -> Any:
    """A rate or a decay as data: a number as a float, and a `PlannedRate` with its total."""
    if isinstance(value, PlannedRate) and value.total is None:
        return dataclasses.replace(value, total=total)
    if callable(value):
        return value
    try:
        return known_number(name, value, "[0, 1e10]")  # times the factor of a law it is finite
    except TypeError:
        raise TypeError(
            f"{name} must be a number in [0, 1e10] or a schedule of the examples seen, such as "
            f"PlannedRate(...), got {value!r} of type {type(value).__name__}."
        ) from None
