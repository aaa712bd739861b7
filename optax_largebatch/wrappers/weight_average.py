"""Keeps an average of the weights, with which a run is evaluated."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_largebatch.arguments import check_number_or_schedule, check_state, number_at
from optax_largebatch.norms import accumulation_dtype, dtype_like
from optax_largebatch.params.leaves import check_params, leaves_of
from optax_largebatch.params.placement import replicated
from optax_largebatch.wrappers.accumulation import has_moved
from optax_largebatch.wrappers.inner import check_inner


class AverageWeightsState(NamedTuple):
    """State of `average_weights`."""

    steps: jax.Array
    """Steps in the average so far, shape ()."""
    weight: jax.Array
    """How much of the average has been filled, from 0 to 1, shape ()."""
    average: optax.Params
    """The average of the weights, in float32 (float64 for float64 parameters)."""
    inner_state: optax.OptState
    """State of the inner transformation."""


def average_weights(
    inner: optax.GradientTransformation, *, half_life: float | jax.Array | optax.Schedule
) -> optax.GradientTransformationExtraArgs:
    r"""Keeps an exponential average of the weights beside those that are trained.

    .. math::

        d_t = 2^{-1 / h_t}, \qquad c_t = d_t c_{t-1} + 1 - d_t, \qquad
        \bar w_t = \bar w_{t-1} + \frac{1 - d_t}{c_t} (w_t - \bar w_{t-1})

    It changes no step. Division by :math:`c_t`, which begins at :math:`c_0 = 0`, leaves the weights
    before the first step out of the average. Read the average with `averaged_params`.

    The average of a run with a small learning rate is not far from the last weights: it helps where
    the rate is still high. Keep the half-life in examples if you change the batch size: with
    :math:`k` times the batch, :math:`h / k` steps, which is :math:`d^k`.

    Put it inside of `master_weights`, so that the average is that of the masters. With
    `accumulate_gradients` it may stand on either side: only complete macro-batches count, and
    no steps that `skip_bad_steps` or `dynamic_loss_scale` leaves out.

    Args:
        inner: the optimizer, from this library or any other.
        half_life: the steps after which weights count half: 1 to 5% of the run. :math:`h`, above 0;
            a float or a schedule of the steps.

    Returns:
        The optimizer. Its `update` needs the parameters; its state is an `AverageWeightsState`.

    Raises:
        ValueError: `half_life` is not above 0.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from optax_largebatch import average_weights, averaged_params
        >>> optimizer = average_weights(optax.sgd(1.0), half_life=1)
        >>> params = jnp.zeros(1)
        >>> state = optimizer.init(params)
        >>> for _ in range(3):
        ...     updates, state = optimizer.update(-jnp.ones(1), state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> average = averaged_params(optimizer, state, params)
        >>> print(params, f"{average[0]:.2f}")
        [3.] 2.43

    References:
        Busbridge et al., *How to Scale Your EMA*, arXiv 2307.13813: the average at another batch.
    """
    inner = check_inner(inner)
    check_number_or_schedule("half_life", half_life, "(0, inf)")

    def init(params: optax.Params) -> AverageWeightsState:
        leaves = leaves_of("params", params)
        # Copies: a step that is given parameters and state to use up cannot take one array twice.
        average = [jnp.array(x, dtype_like(x.dtype)) for x in leaves.arrays]
        steps, weight = replicated((jnp.zeros([], jnp.int32), jnp.zeros([])), params)
        return AverageWeightsState(steps, weight, leaves.rebuild(average), inner.init(params))

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, Any]:
        check_params("average_weights", "averages them", params)
        check_state("average_weights", AverageWeightsState, state)
        updates, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
        counts = has_moved(inner_state)
        leaves = leaves_of("params", params)
        half_lives = number_at(state.steps, "half_life", half_life, "(0, inf)")
        forgotten = -jnp.expm1(-jnp.log(2.0) / jnp.asarray(half_lives, state.weight.dtype))
        weight = state.weight + forgotten * (1 - state.weight)
        share = jnp.where(counts, forgotten / weight, 0)
        average = leaves.alike("the state's average", state.average)
        steps = leaves.align("the updates", updates)
        for index, moved in enumerate(leaves.arrays):
            if steps[index] is not None:
                steps[index] = _as_rounded(steps[index])
                with jax.numpy_dtype_promotion("standard"):
                    moved = _as_rounded(optax.apply_updates(moved, steps[index]))
            before = average[index]
            change = moved.astype(before.dtype) - before
            average[index] = before + share.astype(before.dtype) * change
        return leaves.rebuild(steps), AverageWeightsState(
            steps=jnp.where(counts, optax.safe_increment(state.steps), state.steps),
            weight=jnp.where(counts, weight, state.weight),
            average=leaves.rebuild(average),
            inner_state=inner_state,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _as_rounded(x: Any) -> jax.Array:
    """A low-precision array with its rounding errors, also where it is cast to a wider dtype.

    XLA leaves out a cast that is followed by one back, and would average other weights.
    """
    is_low = x.dtype != accumulation_dtype(x.dtype)
    return jax.lax.optimization_barrier(x) if is_low else x
