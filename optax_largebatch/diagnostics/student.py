"""Quantiles of Student's t distribution, which jax.scipy does not have."""

import jax
import jax.numpy as jnp
import numpy as np

POINTS = 4000
WIDEST = 12
"""The distance from 0, in standard deviations, beyond which nothing is left of the density."""


def student_quantile(probability: float, freedom: float | jax.Array) -> jax.Array:
    r"""The quantile of Student's t distribution; it works under `jit`.

    With :math:`t = \sqrt{\nu} \tan x`, the density of :math:`x` is proportional to
    :math:`\cos(x)^{\nu - 1}`. It is summed up on a grid of :math:`x`.

    Args:
        probability: of a number below the quantile, in (0, 1).
        freedom: the degrees of freedom :math:`\nu`, a positive scalar; it need not be an integer.

    Returns:
        The quantile, in the dtype of `freedom`.
    """
    nu = jnp.asarray(freedom) * 1.0  # an array keeps its dtype, also with 64-bit numbers
    reach = jnp.minimum(np.pi / 2, WIDEST / jnp.sqrt(nu))
    grid = (np.arange(POINTS) + 0.5) / POINTS * 2 - 1
    angles = reach * jnp.asarray(grid, nu.dtype)
    density = jnp.exp((nu - 1) / 2 * jnp.log1p(-jnp.square(jnp.sin(angles))))
    below = (jnp.cumsum(density) - density / 2) / jnp.sum(density)
    return jnp.sqrt(nu) * jnp.tan(jnp.interp(probability, below, angles))
