"""Leaves out steps whose gradient is not finite, or whose gradient norm or loss is a spike."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_largebatch import norms
from optax_largebatch.arguments import (
    check_choice,
    check_integer,
    check_number,
    check_optional_number,
    check_state,
    renamed,
)
from optax_largebatch.params.leaves import gradients_of, leaves_of
from optax_largebatch.params.placement import replicated
from optax_largebatch.wrappers.inner import all_finite, check_inner, step_if

_NORMAL = 1.4826
"""The standard deviation of normal numbers divided by their median absolute deviation."""

_LEAST_DEVIATION = 1e-3
"""The least deviation, as a part of the level, so that numbers that hardly vary have no spikes."""


class SkipBadStepsState(NamedTuple):
    """State of `skip_bad_steps`. It is the same with and without `deviations`."""

    values: jax.Array
    """The last finite norms or losses, one slot for each step of the window; zeros at first."""
    seen: jax.Array
    """The number of finite norms or losses so far, shape (); 0 without `deviations`."""
    skipped: jax.Array
    """Steps left out so far, shape ()."""
    skipped_in_a_row: jax.Array
    """Steps left out since the last step that was taken, shape ()."""
    gave_up: jax.Array
    """Whether there were ever too many in a row, shape ()."""
    inner_state: optax.OptState
    """State of the inner transformation."""

    @property
    def left_out(self) -> jax.Array:
        """Whether the last step was left out, shape ()."""
        return self.skipped_in_a_row > 0


@renamed("max_consecutive_errors", "max_in_a_row")
def skip_bad_steps(
    inner: optax.GradientTransformation,
    *,
    deviations: float | None = None,
    of: Literal["gradient_norm", "loss"] = "gradient_norm",
    window: int = 100,
    max_in_a_row: int = 10,
) -> optax.GradientTransformationExtraArgs:
    r"""Leaves out steps whose gradient is not finite, and, if you give `deviations`, spikes.

    A step that is left out changes nothing: the updates are exact zeros, and the moments, counters
    and schedules of `inner` stay as they were. Inside `jax.shard_map` either all devices leave the
    step out or none does, wherever the infinity is.

    A spike is a gradient norm, or a loss, far above its running level. With :math:`x_t` the norm of
    the whole gradient, or the loss, and :math:`x` the same numbers of the last steps, it is

    .. math::

        x_t > m + k s, \qquad m = \operatorname{median}(x), \qquad
        s = \max(1.4826 \operatorname{median} \lvert x - m \rvert,\ 0.001 \lvert m \rvert),

    where :math:`s` is the standard deviation if the numbers are normally distributed. Spikes stay
    in the window, where they hardly move the medians. So if the level has risen for good, it is
    accepted after half a window. No step of the first window is a spike.

    Nothing raises inside a compiled step, so the training loop reads the state: `gave_up` turns
    True for good after `max_in_a_row` steps in a row were left out.

    Inside `accumulate_gradients`, the norm is that of the mean gradient, and the loss is the one
    given with the last micro-batch: pass the mean of all. Around `accumulate_gradients`, single
    micro-batches are left out.

    Args:
        inner: the transformation that takes the steps, from this library or any other.
        deviations: how far above the recent level a spike begins, in standard deviations: 6 leaves
            out few steps. :math:`k`, positive; None to leave out no spikes.
        of: which number has the spikes: `"gradient_norm"`, or `"loss"`, which needs the extra
            argument `loss` of `update`, a number that is the same on all devices.
        window: the number of steps from which the level is taken: 100, or more for a steadier
            level. 2 or more.
        max_in_a_row: how many steps left out in a row are a fault of the run, so that `gave_up`
            turns True. 1 or more.

    Returns:
        A transformation; its state is a `SkipBadStepsState`. All extra arguments are passed on.

    Raises:
        ValueError: an argument is out of its range, or `of="loss"` is given without `deviations`;
            and, from `update`, the loss is not given, or differs between devices.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from optax_largebatch import skip_bad_steps
        >>> optimizer = skip_bad_steps(optax.sgd(1.0), deviations=6, window=4)
        >>> state = optimizer.init(jnp.zeros(1))
        >>> for gradient in (1.0, 1.2, 0.9, 1.1, 50.0, jnp.nan, 1.3):
        ...     updates, state = optimizer.update(jnp.array([gradient]), state)
        ...     print(updates, state.skipped)
        [-1.] 0
        [-1.2] 0
        [-0.9] 0
        [-1.1] 0
        [0.] 1
        [0.] 2
        [-1.3] 2
    """
    inner = check_inner(inner)
    check_optional_number("deviations", deviations)
    check_choice("of", of, ("gradient_norm", "loss"))
    check_integer("window", window, at_least=2)
    check_integer("max_in_a_row", max_in_a_row, at_least=1)
    if of == "loss" and deviations is None:
        raise ValueError("deviations must be given with of='loss'. Pass deviations=6.")

    def init(params: optax.Params) -> SkipBadStepsState:
        leaves_of("params", params)
        counters = [jnp.zeros([], jnp.int32) for _ in range(3)]
        numbers = [jnp.zeros(window, jnp.float32), *counters, jnp.zeros([], bool)]
        return SkipBadStepsState(*replicated(numbers, params), inner_state=inner.init(params))

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, Any]:
        check_state("skip_bad_steps", SkipBadStepsState, state)
        leaves, gradients = gradients_of(updates, params, extra_args.get("partition_specs"))
        if deviations is None:
            good = all_finite(leaves, gradients)
        elif of == "gradient_norm":  # it is finite only if all gradients are
            good, state = _judged(jnp.sqrt(leaves.sum_of_squares(gradients)), state, deviations)
        else:
            good, state = _judged(_loss(**extra_args), state, deviations)
            good &= all_finite(leaves, gradients)
        new_updates, inner_state = step_if(
            good, inner, leaves, gradients, state.inner_state, params, **extra_args
        )
        in_a_row = jnp.where(good, 0, optax.safe_increment(state.skipped_in_a_row))
        return new_updates, state._replace(
            skipped=jnp.where(good, state.skipped, optax.safe_increment(state.skipped)),
            skipped_in_a_row=in_a_row,
            gave_up=state.gave_up | (in_a_row >= max_in_a_row),
            inner_state=inner_state,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _judged(
    value: jax.Array,
    state: SkipBadStepsState,
    deviations: Any,
) -> tuple[jax.Array, SkipBadStepsState]:
    """Whether a norm or loss is finite and no spike, and the state with it in the window."""
    value = value.astype(state.values.dtype)
    finite = jnp.isfinite(value)
    window = state.values.size
    level = jnp.median(state.values)
    deviation = _NORMAL * jnp.median(jnp.abs(state.values - level))
    limit = level + deviations * jnp.maximum(deviation, _LEAST_DEVIATION * jnp.abs(level))
    good = finite & ((state.seen < window) | (value <= limit))
    values = jnp.where(finite, state.values.at[state.seen % window].set(value), state.values)
    seen = jnp.where(finite, optax.safe_increment(state.seen), state.seen)
    return good, state._replace(values=values, seen=seen)


def _loss(loss: Any = None, **others: Any) -> jax.Array:
    """The extra argument `loss`, checked."""
    if loss is None:
        raise ValueError(
            "loss must be given to `update`, because skip_bad_steps(..., of='loss') looks for "
            "spikes in it. Call optimizer.update(grads, state, params, loss=loss)."
        )
    scalar = jnp.asarray(loss)
    check_number("loss", scalar, "(-inf, inf)")
    norms.check_same_everywhere("loss", scalar, "Call jax.lax.pmean(loss, ...) first.")
    return scalar
