"""Leaves out steps whose gradient is not finite."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_largebatch.arguments import (
    check_integer,
    check_state,
    renamed,
)
from optax_largebatch.params.leaves import gradients_of, leaves_of
from optax_largebatch.params.placement import replicated
from optax_largebatch.wrappers.inner import check_inner
from optax_largebatch.wrappers.skipping import counted, step_if_finite


class SkipNonfiniteState(NamedTuple):
    """State of `skip_nonfinite`."""

    skipped: jax.Array
    """Steps left out so far, shape ()."""
    skipped_in_a_row: jax.Array
    """Steps left out since the last step that was taken, shape ()."""
    gave_up: jax.Array
    """Whether there were ever too many in a row, shape ()."""
    inner_state: optax.OptState
    """State of the inner transformation."""


@renamed(max_consecutive_errors="max_in_a_row")
def skip_nonfinite(
    inner: optax.GradientTransformation, *, max_in_a_row: int = 100
) -> optax.GradientTransformationExtraArgs:
    r"""Leaves out the steps whose gradient holds an infinity or a NaN.

    Such a step changes nothing: the updates are exact zeros, and the moments, counters and
    schedules of `inner` stay as they were. Inside `jax.shard_map` either all devices leave the step
    out or none does, wherever the infinity is.

    Nothing raises inside a compiled step, so the training loop reads the state: `gave_up` turns
    True for good after `max_in_a_row` steps in a row were left out.

    Args:
        inner: the transformation that takes the steps, from this library or any other.
        max_in_a_row: how many steps left out in a row mean that the run is broken, so that
            `gave_up` turns True: 100, or less for long steps. 1 or more.

    Returns:
        A transformation; its state is a `SkipNonfiniteState`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `max_in_a_row` is less than 1.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from optax_largebatch import skip_nonfinite
        >>> optimizer = skip_nonfinite(optax.sgd(1.0))
        >>> state = optimizer.init(jnp.zeros(2))
        >>> updates, state = optimizer.update(jnp.array([1.0, jnp.nan]), state)
        >>> print(updates, state.skipped)
        [0. 0.] 1
    """
    inner = check_inner(inner)
    check_integer("max_in_a_row", max_in_a_row, at_least=1)

    def init(params: optax.Params) -> SkipNonfiniteState:
        leaves_of("params", params)
        own = {
            "skipped": jnp.zeros([], jnp.int32),
            "skipped_in_a_row": jnp.zeros([], jnp.int32),
            "gave_up": jnp.zeros([], bool),
        }
        return SkipNonfiniteState(**replicated(own, params), inner_state=inner.init(params))

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        partition_specs: Any = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, SkipNonfiniteState]:
        check_state("skip_nonfinite", SkipNonfiniteState, state)
        leaves, gradients = gradients_of(updates, params, partition_specs)
        finite, new_updates, inner_state = step_if_finite(
            inner,
            leaves,
            gradients,
            state.inner_state,
            params,
            partition_specs=partition_specs,
            **extra_args,
        )
        return new_updates, SkipNonfiniteState(
            **counted(finite, state, max_in_a_row), inner_state=inner_state
        )

    return optax.GradientTransformationExtraArgs(init, update)
