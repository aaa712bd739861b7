"""A rate that falls at given steps, after a warm-up."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax

from optax_largebatch.arguments import Scalar, check_integer, check_number
from optax_largebatch.schedules.warmup import as_float


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

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range.

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

    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        t = as_float(step)
        grown = jnp.where(t < warmup_steps, t / max(warmup_steps, 1), 1.0)
        stairs = jnp.prod(jnp.where(t < jnp.asarray(drop_steps, t.dtype), 1.0, factor))
        return (warmup_begin_value + (peak_value - warmup_begin_value) * grown) * stairs

    return schedule
