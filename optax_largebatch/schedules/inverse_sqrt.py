"""Decay with the inverse square root of the step, after a warm-up."""

import jax
import jax.numpy as jnp
import optax

from optax_largebatch.arguments import Scalar, check_integer, check_number
from optax_largebatch.schedules.warmup import as_float


def warmup_inverse_sqrt(peak_value: Scalar, *, warmup_steps: int) -> optax.Schedule:
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

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range.

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

    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        t = as_float(step)
        decayed = jnp.sqrt(warmup_steps / jnp.maximum(t, warmup_steps))
        return peak_value * jnp.minimum(t / warmup_steps, decayed)

    return schedule
