"""Leaves out steps whose gradient norm or loss is a spike."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_largebatch import norms
from optax_largebatch.arguments import check_choice, check_integer, check_number, check_state
from optax_largebatch.params.leaves import Leaves, gradients_of, leaves_of
from optax_largebatch.params.placement import replicated
from optax_largebatch.wrappers.inner import check_inner
from optax_largebatch.wrappers.skipping import counted, step_if

_NORMAL = 1.4826
"""The standard deviation of normal numbers divided by their median absolute deviation."""

_LEAST_DEVIATION = 1e-3
"""The least deviation, as a part of the level, so that numbers that hardly vary have no spikes."""


class SkipSpikesState(NamedTuple):
    """State of `skip_spikes`."""

    values: jax.Array
    """The last finite norms or losses, one slot for each step of the window; zeros at first."""
    seen: jax.Array
    """The number of finite norms or losses so far, shape ()."""
    skipped: jax.Array
    """Steps left out so far, shape ()."""
    skipped_in_a_row: jax.Array
    """Steps left out since the last step that was taken, shape ()."""
    gave_up: jax.Array
    """Whether there were ever too many in a row, shape ()."""
    inner_state: optax.OptState
    """State of the inner transformation."""


def skip_spikes(
    inner: optax.GradientTransformation,
    *,
    deviations: float = 6.0,
    of: Literal["gradient_norm", "loss"] = "gradient_norm",
    window: int = 100,
    max_in_a_row: int = 10,
) -> optax.GradientTransformationExtraArgs:
    r"""Leaves out the steps whose gradient norm, or loss, is far above its running level.

    With :math:`x_t` the norm of the whole gradient, or the loss, and :math:`x` the same numbers of
    the last steps, a step is left out if

    .. math::

        x_t > m + k s, \qquad m = \operatorname{median}(x), \qquad
        s = \max(1.4826 \operatorname{median} \lvert x - m \rvert,\ 0.001 \lvert m \rvert),

    where :math:`s` is the standard deviation if the numbers are normally distributed. A step that
    is not finite is left out too. As for `skip_nonfinite`, such a step changes nothing, and either
    all devices leave it out or none does. Spikes stay in the window, where they hardly move the
    medians. So if the level has risen for good, it is accepted after half a window.

    The steps of the first window are all taken, if they are finite.

    Nothing raises inside a compiled step, so the training loop reads the state: `gave_up` turns
    True for good after `max_in_a_row` steps in a row were left out.

    Inside `accumulate_gradients`, the norm is that of the mean gradient, and the loss is the one
    given with the last micro-batch: pass the mean of all. Around `accumulate_gradients`, single
    micro-batches are left out.

    Args:
        inner: the transformation that takes the steps, from this library or any other.
        deviations: how far above the recent level a spike begins, in standard deviations: 6 leaves
            out few steps. :math:`k`, positive.
        of: what is watched: `"gradient_norm"`, or `"loss"`, which needs the extra argument `loss`
            of `update`, a number that is the same on all devices.
        window: how many steps the level is taken from: 100, or more for a steadier level. 2 or
            more.
        max_in_a_row: how many steps left out in a row are no spikes but a fault of the run, so that
            `gave_up` turns True. 1 or more.

    Returns:
        A transformation; its state is a `SkipSpikesState`. All extra arguments are passed on.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range; and, from `update`, `loss` is watched and not
            given, or differs between devices.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from optax_largebatch import skip_spikes
        >>> optimizer = skip_spikes(optax.sgd(1.0), window=4)
        >>> state = optimizer.init(jnp.zeros(1))
        >>> for gradient in (1.0, 1.2, 0.9, 1.1, 50.0, 1.3):
        ...     updates, state = optimizer.update(jnp.array([gradient]), state)
        ...     print(updates, state.skipped)
        [-1.] 0
        [-1.2] 0
        [-0.9] 0
        [-1.1] 0
        [0.] 1
        [-1.3] 1
    """
    inner = check_inner(inner)
    check_number("deviations", deviations, "(0, inf)")
    check_choice("of", of, ("gradient_norm", "loss"))
    check_integer("window", window, at_least=2)
    check_integer("max_in_a_row", max_in_a_row, at_least=1)

    def init(params: optax.Params) -> SkipSpikesState:
        leaves_of("params", params)
        own = {
            "values": jnp.zeros(window, jnp.float32),
            "seen": jnp.zeros([], jnp.int32),
            "skipped": jnp.zeros([], jnp.int32),
            "skipped_in_a_row": jnp.zeros([], jnp.int32),
            "gave_up": jnp.zeros([], bool),
        }
        return SkipSpikesState(**replicated(own, params), inner_state=inner.init(params))

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        partition_specs: Any = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, SkipSpikesState]:
        check_state("skip_spikes", SkipSpikesState, state)
        leaves, gradients = gradients_of(updates, params, partition_specs)
        watched = _norm(leaves, gradients) if of == "gradient_norm" else _loss(**extra_args)
        watched = watched.astype(state.values.dtype)
        known = jnp.isfinite(watched)
        judged = state.seen >= window
        calm = known & (~judged | (watched <= _limit(state.values, deviations)))
        new_updates, inner_state = step_if(
            calm,
            inner,
            leaves,
            gradients,
            state.inner_state,
            params,
            partition_specs=partition_specs,
            **extra_args,
        )
        return new_updates, SkipSpikesState(
            values=jnp.where(
                known, state.values.at[state.seen % window].set(watched), state.values
            ),
            seen=jnp.where(known, optax.safe_increment(state.seen), state.seen),
            **counted(calm, state, max_in_a_row),
            inner_state=inner_state,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _limit(values: jax.Array, deviations: Any) -> jax.Array:
    """The largest value that is no spike."""
    level = jnp.median(values)
    deviation = _NORMAL * jnp.median(jnp.abs(values - level))
    return level + deviations * jnp.maximum(deviation, _LEAST_DEVIATION * jnp.abs(level))


def _norm(leaves: Leaves, gradients: list[Any]) -> jax.Array:
    """The norm of the whole gradient, the same on all devices."""
    squares = {
        index: norms.sum_of_squares(gradient)
        for index, gradient in enumerate(gradients)
        if gradient is not None
    }
    whole = norms.over_shards(squares, {index: leaves.split(index) for index in squares})
    return jnp.sqrt(norms.total(list(whole.values()))) if whole else jnp.zeros([])


def _loss(loss: Any = None, **others: Any) -> jax.Array:
    """The extra argument `loss`, checked."""
    if loss is None:
        raise ValueError(
            "loss must be given to `update`, because skip_spikes(..., of='loss') watches it. Call "
            "optimizer.update(grads, state, params, loss=loss)."
        )
    watched = jnp.asarray(loss)
    check_number("loss", watched, "(-inf, inf)")
    axes = norms.varying_axes(watched)
    if axes:
        raise ValueError(
            "loss must be the same on all devices; it differs along the mesh axes "
            f"{', '.join(map(repr, sorted(axes)))}. Call jax.lax.pmean(loss, ...) first."
        )
    return watched
