"""Small pieces of arithmetic that several transforms share."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_largebatch.arguments import Bounds, Scalar
from optax_largebatch.norms import accumulation_dtype, dtype_like, from_sum_of_squares

root = from_sum_of_squares
"""The square root, with a derivative of 0 at 0.

A second moment is flat at 0, because it sums squares. The usual rule for roots multiplies that
slope of 0 by an infinite one, which gives NaN.
"""


def quotient(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a / b`, or 0 where `b` is 0: a root of a mean of squares is 0 only if all squares are."""
    zero = b == 0
    return jnp.where(zero, 0, a / jnp.where(zero, 1, b))


def positive(x: jax.Array) -> jax.Array:
    """A denominator of 0 or more, with 1 in place of 0; NaN stays NaN."""
    return jnp.where(x <= 0, 1, x)


def one_is_zero(a: jax.Array, b: jax.Array) -> jax.Array:
    """Whether one of two norms is 0; False where one is NaN, so that their ratio becomes NaN."""
    return jnp.minimum(a, b) <= 0


def clip(x: jax.Array, bounds: Bounds) -> jax.Array:
    """`min(max(x, low), high)`; an end that is None is no bound."""
    return x if bounds is None else jnp.clip(x, *bounds)


def bias_correction(decay: Scalar, t: jax.Array) -> jax.Array:
    """`1 - decay**t` to full relative precision, even for `decay` near 1 and small `t`."""
    dtype = jnp.result_type(float)
    if isinstance(decay, jax.Array):
        log = jnp.log(decay.astype(dtype))
    else:
        with np.errstate(divide="ignore"):
            log = jnp.asarray(np.log(decay), dtype)
    return -jnp.expm1(log * t.astype(dtype))


def momentum_weights(
    decay: Scalar,
    t: jax.Array,
    nesterov: bool,
) -> tuple[jax.Array, jax.Array | float]:
    r"""The weights of a running mean and of the gradient in a step, corrected for their start.

    The mean has the weight :math:`1 / (1 - b^t)`. With Nesterov's momentum it has
    :math:`b / (1 - b^{t+1})`, and the gradient has :math:`(1 - b) / (1 - b^t)`.
    """
    if not nesterov:
        return 1 / bias_correction(decay, t), 0.0
    return decay / bias_correction(decay, t + 1), (1 - decay) / bias_correction(decay, t)


def is_due(count: jax.Array, period: int) -> jax.Array:
    """Whether the parameters are measured: in the first step, and in the last of each period."""
    return (count == 0) | (count % period == period - 1)


def zeros_like(
    params: optax.Params,
    dtype: jax.typing.DTypeLike | None,
    is_real: bool = False,
) -> optax.Updates:
    """Zeros in `dtype`; if that is None, in the accumulation dtype of each leaf.

    Those of complex parameters are complex, unless `is_real`.
    """

    def zeros(param: jax.Array) -> jax.Array:
        like = jnp.result_type(param)
        like = accumulation_dtype(like) if is_real else like
        return jnp.zeros_like(param, dtype=dtype_like(like, dtype))

    return jax.tree.map(zeros, params)
