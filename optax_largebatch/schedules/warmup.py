"""Warm-up to a learning rate for large batches, and the decay after it."""

from typing import Literal

import jax
import jax.numpy as jnp
import optax

from optax_largebatch.arguments import Scalar, check_choice, check_integer, check_number


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

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range.

    Examples:
        >>> from optax_largebatch import large_batch_warmup
        >>> schedule = large_batch_warmup(0.1, batch_scale=8, warmup_steps=10)
        >>> print([round(float(schedule(step)), 3) for step in (0, 5, 10, 99)])
        [0.1, 0.45, 0.8, 0.8]

    References:
        MXNet `LBSGD`; Goyal et al., *Accurate, Large Minibatch SGD*, arXiv 1706.02677,
        section 2.2, for the linear form.
    """
    check_number("learning_rate", learning_rate, "[0, inf)")
    check_number("batch_scale", batch_scale, "[1, inf)")
    check_number("warmup_steps", warmup_steps, "[0, inf)")
    check_choice("strategy", strategy, ("linear", "power2", "sqrt"))
    shape = {"linear": lambda x: x, "power2": jnp.square, "sqrt": jnp.sqrt}[strategy]

    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        t = as_float(step)
        grown = shape(t / jnp.where(jnp.asarray(warmup_steps) > 1, warmup_steps, jnp.inf))
        return learning_rate * jnp.where(
            t >= warmup_steps, batch_scale, 1 + (batch_scale - 1) * grown
        )

    return schedule


def warmup_polynomial(
    peak_value: Scalar,
    *,
    total_steps: int,
    power: Scalar = 1.0,
    end_value: Scalar = 0.0,
    warmup_steps: int = 0,
    warmup_begin_value: Scalar = 0.0,
    warmup_mode: Literal["linear", "constant"] = "linear",
    warmup_begin_step: int = 0,
    decay_begin_step: int | None = None,
) -> optax.Schedule:
    r"""Warm-up, then polynomial decay, then hold.

    .. math::

        \eta_t = \begin{cases}
            \eta_0 + (\eta - \eta_0) (t - s) / W & t - s < W \\
            \eta_e + (\eta - \eta_e) \left(1 - \frac{t - d}{N - d}\right)^p & t < N \\
            \eta_e & t \ge N
        \end{cases}

    Args:
        peak_value: the value after the warm-up, the highest of the run: the rate to search for, see
            the optimizer. :math:`\eta`, 0 or more.
        total_steps: the step at which the decay ends, usually the last of the run. :math:`N`, 1 or
            more, and no less than the end of the warm-up. If both are equal, `end_value` follows
            the warm-up.
        power: the shape of the decay: 1 is a straight line, as in LAMB's papers; 2, as in MLPerf's
            ResNet-50 and MXNet, falls faster at first; 0.5, as in NVIDIA's BERT, faster at the end.
            :math:`p`, positive.
        end_value: the value at the end and from then on, usually 0. :math:`\eta_e`, 0 or more.
        warmup_steps: how many steps the value grows for: some 1% to 10% of the run, up to 43% at
            the largest batches. :math:`W`, 0 or more.
        warmup_begin_value: the value at the first step of the warm-up, usually 0. :math:`\eta_0`, 0
            or more.
        warmup_mode: `"linear"` as above; `"constant"` holds :math:`\eta_0` for the warm-up.
        warmup_begin_step: where the warm-up begins: usually 0. A negative step begins training in
            the middle of the warm-up, as MLPerf's BERT does. :math:`s`, 0 or less.
        decay_begin_step: the step from which the decay is counted: None for the end of the warm-up,
            :math:`s + W`. MLPerf's BERT counts it from 0. :math:`d`.

    Returns:
        A schedule: step (0 first) to value.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range.

    Examples:
        >>> from optax_largebatch import warmup_polynomial
        >>> schedule = warmup_polynomial(1.0, total_steps=10, warmup_steps=5)
        >>> print([round(float(schedule(step)), 3) for step in (0, 1, 5, 9, 10, 99)])
        [0.0, 0.2, 1.0, 0.2, 0.0, 0.0]

    References:
        MXNet `PolyScheduler`; MLPerf Training, BERT reference, for the negative begin.
    """
    check_number("peak_value", peak_value, "[0, inf)")
    check_integer("total_steps", total_steps, at_least=1)
    check_number("power", power, "(0, inf)")
    check_number("end_value", end_value, "[0, inf)")
    check_integer("warmup_steps", warmup_steps, at_least=0)
    check_number("warmup_begin_value", warmup_begin_value, "[0, inf)")
    check_choice("warmup_mode", warmup_mode, ("linear", "constant"))
    check_number("warmup_begin_step", warmup_begin_step, "(-inf, 0]")
    warmup_end = max(warmup_begin_step + warmup_steps, 0)
    if total_steps < warmup_end:
        raise ValueError(
            f"total_steps must be no less than the end of the warm-up, {warmup_end}; "
            f"got {total_steps!r}."
        )
    if decay_begin_step is not None:
        check_integer("decay_begin_step", decay_begin_step, at_least=0)
        if decay_begin_step > warmup_end:
            raise ValueError(
                f"decay_begin_step must be no later than the end of the warm-up, {warmup_end}; got "
                f"{decay_begin_step!r}. (warmup_hold_decay has a hold between the two.)"
            )
    decay_begin = warmup_end if decay_begin_step is None else decay_begin_step

    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        t = as_float(step)
        grown = (t - warmup_begin_step) / max(warmup_steps, 1)
        slope = 0.0 if warmup_mode == "constant" else peak_value - warmup_begin_value
        left = 1 - jnp.clip((t - decay_begin) / max(total_steps - decay_begin, 1), 0, 1)
        decayed = end_value + (peak_value - end_value) * left**power
        decayed = jnp.where(t < total_steps, decayed, end_value)
        return jnp.where(t < warmup_end, warmup_begin_value + slope * grown, decayed)

    return schedule


def warmup_hold_decay(
    peak_value: Scalar,
    *,
    warmup_steps: int,
    hold_steps: int,
    total_steps: int,
    end_value: Scalar = 0.0,
) -> optax.Schedule:
    r"""Linear warm-up from 0, a hold, then linear decay: the schedule of LANS.

    .. math::

        \eta_t = \begin{cases}
            \eta\, t / W & t < W \\
            \eta & W \le t < W + H \\
            \eta_e + (\eta - \eta_e) \frac{N - t}{N - W - H} & W + H \le t < N \\
            \eta_e & t \ge N
        \end{cases}

    Args:
        peak_value: the value after the warm-up, the highest of the run: the rate to search for, see
            the optimizer. :math:`\eta`, 0 or more.
        warmup_steps: how many steps the value grows for: 43% and 19% of the two phases of LANS's
            paper. :math:`W`, 0 or more.
        hold_steps: how many steps the value stays at the peak: the more the less time is lost at
            low rates, if training is stable. :math:`H`, 0 or more.
        total_steps: the step at which the decay ends, usually the last of the run. :math:`N`, no
            less than :math:`W + H`.
        end_value: the value at the end and from then on, usually 0. :math:`\eta_e`, 0 or more.

    Returns:
        A schedule: step (0 first) to value.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range.

    Examples:
        >>> from optax_largebatch import warmup_hold_decay
        >>> schedule = warmup_hold_decay(1.0, warmup_steps=4, hold_steps=2, total_steps=10)
        >>> print([float(schedule(step)) for step in (0, 2, 4, 6, 8, 10)])
        [0.0, 0.5, 1.0, 1.0, 0.5, 0.0]

    References:
        Zheng et al., *Accelerated Large Batch Optimization of BERT Pretraining in 54 minutes*,
        arXiv 2006.13484, section 3.3.
    """
    check_number("peak_value", peak_value, "[0, inf)")
    check_integer("warmup_steps", warmup_steps, at_least=0)
    check_integer("hold_steps", hold_steps, at_least=0)
    check_integer("total_steps", total_steps, at_least=1)
    check_number("end_value", end_value, "[0, inf)")
    hold_end = warmup_steps + hold_steps
    if total_steps < hold_end:
        raise ValueError(
            f"total_steps must be no less than warmup_steps + hold_steps = {hold_end}, "
            f"got {total_steps!r}."
        )

    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        t = as_float(step)
        grown = peak_value * jnp.minimum(t / max(warmup_steps, 1), 1)
        left = jnp.clip((total_steps - t) / max(total_steps - hold_end, 1), 0, 1)
        decayed = jnp.where(t < total_steps, end_value + (peak_value - end_value) * left, end_value)
        held = jnp.where(t < warmup_steps, grown, peak_value)
        return jnp.where(t < hold_end, held, decayed)

    return schedule


def as_float(step: jax.typing.ArrayLike) -> jax.Array:
    """A step count as a float32 number (float64 under x64)."""
    return jnp.asarray(step, jnp.result_type(float))
