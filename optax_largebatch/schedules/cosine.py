"""Cosine decay, after a warm-up and an optional hold."""

import jax
import jax.numpy as jnp
import optax

from optax_largebatch.arguments import (
    Scalar,
    check_integer,
    check_number,
    renamed,
)
from optax_largebatch.schedules.warmup import as_float


@renamed(init_value="warmup_begin_value", decay_steps="total_steps")
def warmup_cosine(
    peak_value: Scalar,
    *,
    total_steps: int,
    end_value: Scalar = 0.0,
    warmup_steps: int = 0,
    warmup_begin_value: Scalar = 0.0,
    warmup_begin_step: int = 0,
    hold_steps: int = 0,
    decay_begin_step: int | None = None,
    steps_per_stair: int = 1,
) -> optax.Schedule:
    r"""Linear warm-up, a hold, half a cosine, and its last value from then on.

    .. math::

        \eta_t = \begin{cases}
            \eta_0 + (\eta - \eta_0) (t - s) / W & t - s < W \\
            \eta & t - s < W + H \\
            \eta_e + (\eta - \eta_e) \left(1 + \cos \pi \frac{t - d}{N - d}\right) / 2 & t < N \\
            \eta_e & t \ge N
        \end{cases}

    With the default `hold_steps`, `decay_begin_step` and `steps_per_stair`, it is
    `optax.warmup_cosine_decay_schedule`.

    Args:
        peak_value: the value after the warm-up, the highest of the run: the rate to search for, see
            the optimizer. :math:`\eta`, 0 or more.
        total_steps: the step at which the cosine ends, usually the last of the run. :math:`N`, no
            less than the end of the hold.
        end_value: the value at the end and from then on, usually 0. :math:`\eta_e`, 0 or more.
        warmup_steps: how many steps the value grows for: some 1% to 10% of the run, up to 43% at
            the largest batches. :math:`W`, 0 or more.
        warmup_begin_value: the value at the first step of the warm-up, usually 0. :math:`\eta_0`, 0
            or more.
        warmup_begin_step: where the warm-up begins: usually 0; -1 counts its steps from 1.
            :math:`s`, 0 or less.
        hold_steps: how many steps the value stays at the peak, usually 0. :math:`H`, 0 or more.
        decay_begin_step: the step from which the cosine is counted: None for the end of the hold.
            timm counts the cosine from 0, so the warm-up replaces its beginning. :math:`d`.
        steps_per_stair: the value changes only at multiples of this number. With the steps of an
            epoch, it changes once in each epoch.

    Returns:
        A schedule: step (0 first) to value.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range.

    Examples:
        >>> from optax_largebatch import warmup_cosine
        >>> schedule = warmup_cosine(1.0, total_steps=10, warmup_steps=4)
        >>> print([round(float(schedule(step)), 3) for step in (0, 2, 4, 7, 10, 99)])
        [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]

    References:
        Loshchilov and Hutter, *SGDR: Stochastic Gradient Descent with Warm Restarts*,
        arXiv 1608.03983, equation 5, without restarts.
    """
    check_number("peak_value", peak_value, "[0, inf)")
    check_integer("total_steps", total_steps, at_least=1)
    check_number("end_value", end_value, "[0, inf)")
    check_integer("warmup_steps", warmup_steps, at_least=0)
    check_number("warmup_begin_value", warmup_begin_value, "[0, inf)")
    check_number("warmup_begin_step", warmup_begin_step, "(-inf, 0]")
    check_integer("hold_steps", hold_steps, at_least=0)
    check_integer("steps_per_stair", steps_per_stair, at_least=1)
    warmup_end = max(warmup_begin_step + warmup_steps, 0)
    hold_end = warmup_end + hold_steps
    if total_steps < hold_end:
        raise ValueError(
            f"total_steps must be no less than the end of the warm-up and the hold, {hold_end}; "
            f"got {total_steps!r}."
        )
    if decay_begin_step is not None:
        check_integer("decay_begin_step", decay_begin_step, at_least=0)
        if decay_begin_step > hold_end:
            raise ValueError(
                f"decay_begin_step must be no later than the end of the hold, {hold_end}; got "
                f"{decay_begin_step!r}. (A later one is a longer hold: hold_steps.)"
            )
    decay_begin = hold_end if decay_begin_step is None else decay_begin_step

    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        t = as_float(step)
        t = t - t % steps_per_stair
        slope = (peak_value - warmup_begin_value) / max(warmup_steps, 1)
        grown = warmup_begin_value + slope * (t - warmup_begin_step)
        part = jnp.clip((t - decay_begin) / max(total_steps - decay_begin, 1), 0, 1)
        decayed = end_value + (peak_value - end_value) * (1 + jnp.cos(jnp.pi * part)) / 2
        decayed = jnp.where(t < total_steps, decayed, end_value)
        held = jnp.where(t < hold_end, peak_value, decayed)
        return jnp.where(t < warmup_end, grown, held)

    return schedule
