"""Learning rates that warm up and then decay."""

from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import optax

from optax_largebatch.arguments import (
    Scalar,
    check_choice,
    check_integer,
    check_number,
    check_numbers,
    check_optional_number,
    refused,
    renamed,
)

SHAPES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "linear": lambda r: 1 - r,
    "cosine": lambda r: (1 + jnp.cos(jnp.pi * r)) / 2,
    "sqrt": lambda r: 1 - jnp.sqrt(r),
    "constant": jnp.ones_like,
}
"""How much of the way from the peak to the end is left after a part of the decay."""

POWERS: dict[str, Callable[[jax.Array, Scalar], jax.Array]] = {
    "polynomial": lambda r, p: (1 - r) ** p,
    "power": lambda r, p: 1 - r**p,
}
"""The same for the shapes that have a power."""


@refused(
    "warmup_mode",
    why="For a constant warm-up join optax.constant_schedule and warmup_decay with "
    "optax.join_schedules.",
)
@renamed("init_value", "warmup_begin_value")
@renamed("decay_steps", "total_steps")
def warmup_decay(
    peak_value: Scalar,
    *,
    total_steps: int,
    decay: Literal["linear", "cosine", "sqrt", "constant", "polynomial", "power"] = "linear",
    power: Scalar | None = None,
    end_value: Scalar = 0.0,
    warmup_steps: int = 0,
    warmup_begin_value: Scalar = 0.0,
    warmup_begin_step: int = 0,
    hold_steps: int = 0,
    decay_begin_step: int | None = None,
    steps_per_stair: int = 1,
) -> optax.Schedule:
    r"""Linear warm-up, a hold at the peak, and a decay.

    .. math::

        \eta_t = \begin{cases}
            \eta_0 + (\eta - \eta_0) (t - s) / W & t - s < W \\
            \eta & t - s < W + H \\
            \eta_e + (\eta - \eta_e) f\left(\frac{t - d}{N - d}\right) & t < N \\
            \eta_e & t \ge N
        \end{cases}

    The shape :math:`f` of the decay is

    .. math::

        \begin{array}{ll}
            \text{linear} & 1 - r \\
            \text{cosine} & (1 + \cos \pi r) / 2 \\
            \text{sqrt} & 1 - \sqrt r \\
            \text{polynomial} & (1 - r)^p \\
            \text{power} & 1 - r^p \\
            \text{constant} & 1
        \end{array}

    A constant decay stays at the peak; :math:`N` and :math:`\eta_e` then do nothing.

    Args:
        peak_value: the value after the warm-up, the highest of the run: the rate to search for, see
            the optimizer. :math:`\eta`, 0 or more.
        total_steps: the step at which the decay ends, usually the last of the run. :math:`N`, 1 or
            more, and no less than the end of the hold. If both are equal, `end_value` follows the
            hold.
        decay: the shape :math:`f`. `"linear"` as in the papers of LAMB and LANS; `"cosine"` as in
            most of self-supervised vision; `"sqrt"` after a long hold (warm-up, stable, decay);
            `"polynomial"` with a power of 2, as in MLPerf's ResNet-50 and MXNet, falls faster at
            first, and with 0.5, as in NVIDIA's BERT, faster at the end.
        power: :math:`p`, positive; for `"polynomial"` and `"power"` only.
        end_value: the value at the end and from then on, usually 0. :math:`\eta_e`, 0 or more.
        warmup_steps: how many steps the value grows for: some 1% to 10% of the run, up to 43% at
            the largest batches. :math:`W`, 0 or more.
        warmup_begin_value: the value at the first step of the warm-up, usually 0. :math:`\eta_0`, 0
            or more.
        warmup_begin_step: where the warm-up begins: usually 0; -1 counts its steps from 1. MLPerf's
            BERT begins training in the middle of the warm-up. :math:`s`, 0 or less.
        hold_steps: how many steps the value stays at the peak. :math:`H`, 0 or more. LANS's paper
            warms up for 43% of its first phase and holds for 27%; a long hold and a decay over the
            last 10% to 20% is known as WSD.
        decay_begin_step: the step from which the decay is counted: None for the end of the hold.
            MLPerf's BERT and timm count it from 0, so the warm-up replaces its beginning.
            :math:`d`.
        steps_per_stair: the value changes only at multiples of this number. With the steps of an
            epoch, it changes once in each epoch.

    Returns:
        A schedule: step (0 first) to value.

    Raises:
        ValueError: an argument is out of its range, or `power` does not go with `decay`.

    Examples:
        >>> from optax_largebatch import warmup_decay
        >>> schedule = warmup_decay(1.0, total_steps=10, warmup_steps=4, hold_steps=2)
        >>> print([round(float(schedule(step)), 3) for step in (0, 2, 4, 6, 8, 10, 99)])
        [0.0, 0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
        >>> schedule = warmup_decay(1.0, total_steps=10, warmup_steps=4, decay="cosine")
        >>> print([round(float(schedule(step)), 3) for step in (0, 2, 4, 7, 10, 99)])
        [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]

    References:
        Linear: You et al., arXiv 1904.00962; with a hold, Zheng et al., arXiv 2006.13484, section
        3.3. Cosine: Loshchilov and Hutter, *SGDR*, arXiv 1608.03983, equation 5, without restarts.
        Sqrt: Hägele et al., *Scaling Laws and Compute-Optimal Training Beyond Fixed Training
        Durations*, arXiv 2405.18392. Polynomial: MXNet `PolyScheduler`. Power: modded-nanogpt, pull
        request 345 (:math:`p` = 0.4). A negative begin: MLPerf Training, BERT reference.
    """
    check_numbers("[0, inf)", peak_value=peak_value, end_value=end_value)
    check_integer("total_steps", total_steps, at_least=1)
    check_choice("decay", decay, (*SHAPES, *POWERS))
    if (power is None) == (decay in POWERS):
        raise ValueError(
            f"power must be a number for the decays 'polynomial' and 'power', and None for all "
            f"others; got {power!r} for {decay!r}."
        )
    check_optional_number("power", power)
    check_integer("warmup_steps", warmup_steps, at_least=0)
    check_number("warmup_begin_value", warmup_begin_value, "[0, inf)")
    check_number("warmup_begin_step", warmup_begin_step, "(-inf, 0]")
    check_integer("hold_steps", hold_steps, at_least=0)
    check_integer("steps_per_stair", steps_per_stair, at_least=1)
    warmup_end = max(warmup_begin_step + warmup_steps, 0)
    hold_end = warmup_end + hold_steps
    if total_steps < hold_end:
        raise ValueError(
            f"total_steps must be {hold_end} (warm-up and hold) or more, got {total_steps!r}."
        )
    if decay_begin_step is not None:
        check_integer("decay_begin_step", decay_begin_step, at_least=0)
        if decay_begin_step > hold_end:
            raise ValueError(
                f"decay_begin_step must be no later than the end of the hold, {hold_end}; got "
                f"{decay_begin_step!r}. (A later one is a longer hold: hold_steps.)"
            )
    decay_begin = float(hold_end if decay_begin_step is None else decay_begin_step)
    # Floats, since numbers of examples do not fit into integers of 32 bits.
    end = float(total_steps)
    stair = float(steps_per_stair)

    def schedule(step: ArrayLike) -> jax.Array:
        t = as_float(step)
        if steps_per_stair > 1:  # a plan asks between two steps, too
            t = jnp.floor(t / stair) * stair
        grown = (t - warmup_begin_step) / max(float(warmup_steps), 1)
        rising = warmup_begin_value + (peak_value - warmup_begin_value) * grown
        r = jnp.clip((t - decay_begin) / max(end - decay_begin, 1), 0, 1)
        r = jnp.where(t < end, r, 1.0)
        left = SHAPES[decay](r) if power is None else POWERS[decay](r, power)
        falling = end_value + (peak_value - end_value) * left
        held = jnp.where(t < float(hold_end), peak_value, falling)
        return jnp.where(t < float(warmup_end), rising, held)

    return schedule


def warmup_drops(
    peak_value: Scalar,
    *,
    drop_steps: Sequence[int],
    factor: Scalar = 0.1,
    warmup_steps: int = 0,
    warmup_begin_value: Scalar = 0.0,
) -> optax.Schedule:
    r"""Linear warm-up, then a value that is multiplied by a factor at given steps.

    .. math::

        \eta_t = \left(\eta_0 + (\eta - \eta_0) \min\left(\frac{t}{W}, 1\right)\right) f^{n_t}

    with :math:`n_t` the number of drops at :math:`t` or before.

    Args:
        peak_value: the value after the warm-up, the highest of the run: the rate to search for, see
            the optimizer. :math:`\eta`, 0 or more.
        drop_steps: the steps at which the value falls, such as those after 30, 60 and 80 of 90
            epochs. Each 1 or more.
        factor: what each drop multiplies the value by: usually 0.1. :math:`f`, in (0, 1).
        warmup_steps: how many steps the value grows for: some 1% to 10% of the run, up to 43% at
            the largest batches. :math:`W`, 0 or more.
        warmup_begin_value: the value at the first step of the warm-up, usually 0. :math:`\eta_0`, 0
            or more.

    Returns:
        A schedule: step (0 first) to value.

    Examples:
        >>> from optax_largebatch import warmup_drops
        >>> schedule = warmup_drops(1.0, drop_steps=[6, 8], warmup_steps=4)
        >>> print([round(float(schedule(step)), 3) for step in (0, 2, 4, 6, 8, 99)])
        [0.0, 0.5, 1.0, 0.1, 0.01, 0.01]

    References:
        Goyal et al., *Accurate, Large Minibatch SGD*, arXiv 1706.02677, section 5.1.
    """
    check_number("peak_value", peak_value, "[0, inf)")
    check_number("factor", factor, "(0, 1)")
    check_integer("warmup_steps", warmup_steps, at_least=0)
    check_number("warmup_begin_value", warmup_begin_value, "[0, inf)")
    if not hasattr(drop_steps, "__len__"):
        raise TypeError(f"drop_steps must be a sequence of steps, got {drop_steps!r}.")
    for index, drop in enumerate(drop_steps):
        check_integer(f"drop_steps[{index}]", drop, at_least=1)

    def schedule(step: ArrayLike) -> jax.Array:
        t = as_float(step)
        grown = jnp.where(t < warmup_steps, t / max(warmup_steps, 1), 1.0)
        stairs = jnp.prod(jnp.where(t < jnp.asarray(drop_steps, t.dtype), 1.0, factor))
        return (warmup_begin_value + (peak_value - warmup_begin_value) * grown) * stairs

    return schedule


def warmup_inverse_sqrt(
    peak_value: Scalar,
    *,
    warmup_steps: int,
) -> optax.Schedule:
    r"""Linear warm-up from 0, then decay with the inverse square root of the step.

    .. math:: \eta_t = \eta \min\left(\frac{t}{W}, \sqrt{\frac{W}{t}}\right)

    The schedule has no end.

    Args:
        peak_value: the value after the warm-up, the highest of the run: the rate to search for, see
            the optimizer. :math:`\eta`, 0 or more.
        warmup_steps: how many steps the value grows for; from then on it falls as the inverse root
            of the step, so more steps also mean a slower fall. :math:`W`, 1 or more.

    Returns:
        A schedule: step (0 first) to value.

    Examples:
        >>> from optax_largebatch import warmup_inverse_sqrt
        >>> schedule = warmup_inverse_sqrt(1.0, warmup_steps=4)
        >>> print([float(schedule(step)) for step in (0, 2, 4, 16)])
        [0.0, 0.5, 1.0, 0.5]

    References:
        Vaswani et al., *Attention Is All You Need*, arXiv 1706.03762, equation 3.
    """
    check_number("peak_value", peak_value, "[0, inf)")
    check_integer("warmup_steps", warmup_steps, at_least=1)

    def schedule(step: ArrayLike) -> jax.Array:
        t = as_float(step)
        decayed = jnp.sqrt(warmup_steps / jnp.maximum(t, warmup_steps))
        return peak_value * jnp.minimum(t / warmup_steps, decayed)

    return schedule


def large_batch_warmup(
    learning_rate: Scalar,
    *,
    batch_scale: Scalar,
    warmup_steps: Scalar,
    strategy: Literal["linear", "power2", "sqrt"] = "linear",
) -> optax.Schedule:
    r"""Grows the learning rate of a small batch to that of a batch `batch_scale` times as large.

    .. math::

        \eta_t = \eta \left(1 + (S - 1) f(t / W)\right), \qquad
        f(x) = x \ (\text{linear}),\ x^2 \ (\text{power2}),\ \sqrt{x} \ (\text{sqrt})

    for :math:`t < W`, and :math:`\eta S` from then on.

    Args:
        learning_rate: the rate that suits the small batch, such as 0.1 for SGD at 256.
            :math:`\eta`, 0 or more.
        batch_scale: how many times larger the large batch is. :math:`S`, 1 or more.
        warmup_steps: how many steps the rate grows for. With 1 or less, it jumps from :math:`\eta`
            to :math:`\eta S`. :math:`W`, 0 or more.
        strategy: how the rate grows, :math:`f`: `"linear"`, slower at first (`"power2"`) or faster
            at first (`"sqrt"`).

    Returns:
        A schedule: step (0 first) to learning rate.

    Examples:
        >>> from optax_largebatch import large_batch_warmup
        >>> schedule = large_batch_warmup(0.1, batch_scale=8, warmup_steps=10)
        >>> print([round(float(schedule(step)), 3) for step in (0, 5, 10, 99)])
        [0.1, 0.45, 0.8, 0.8]

    References:
        MXNet `LBSGD`; Goyal et al., *Accurate, Large Minibatch SGD*, arXiv 1706.02677,
        section 2.2, for the linear form.
    """
    check_numbers("[0, inf)", learning_rate=learning_rate, warmup_steps=warmup_steps)
    check_number("batch_scale", batch_scale, "[1, inf)")
    check_choice("strategy", strategy, ("linear", "power2", "sqrt"))
    shape = {"linear": lambda x: x, "power2": jnp.square, "sqrt": jnp.sqrt}[strategy]

    def schedule(step: ArrayLike) -> jax.Array:
        t = as_float(step)
        length = jnp.where(jnp.asarray(warmup_steps) > 1, warmup_steps, jnp.inf)
        rising = 1 + (batch_scale - 1) * shape(t / length)
        return learning_rate * jnp.where(t >= warmup_steps, batch_scale, rising)

    return schedule


def as_float(step: ArrayLike) -> jax.Array:
    """A step count as a float32 number (float64 under x64)."""
    return jnp.asarray(step, jnp.result_type(float))
