"""Takes a step on a condition, or leaves it out."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax

from optax_largebatch import norms
from optax_largebatch.params.leaves import Leaves

T = TypeVar("T")


def taken_if(condition: jax.Array, step: Callable[[], T], left_out: Callable[[], T]) -> T:
    """The result of one of two functions; arrays that `left_out` passes on stay in place.

    With `jax.lax.cond`, XLA copies these arrays twice, whether the step is taken or not, unless the
    function that passes them on comes first. `jax.lax.switch` lets us choose the order (JAX's issue
    39449).

    Args:
        condition: whether to take the step, shape ().
        step: returns what the step does.
        left_out: returns the same kind of result without the step.

    Returns:
        The result of `step` or of `left_out`.
    """
    return jax.lax.switch(condition.astype(jnp.int32), [left_out, step])


def step_if_finite(
    inner: optax.GradientTransformationExtraArgs,
    leaves: Leaves,
    gradients: list[Any],
    inner_state: optax.OptState,
    params: optax.Params | None,
    **extra_args: Any,
) -> tuple[jax.Array, optax.Updates, optax.OptState]:
    """Takes a step of `inner`, unless a gradient holds an infinity or a NaN.

    Inside `jax.shard_map` either all devices take the step or none does, wherever the infinity is.

    Args:
        inner: the transformation.
        leaves: the parameters, with how they are split.
        gradients: the gradient of each, or None.
        inner_state: the state of `inner`.
        params: the parameters as `update` was given them.
        **extra_args: what else `inner` is given.

    Returns:
        Whether the step was taken, the updates in the parameters' dtypes and the state of `inner`;
        if the step was not taken, zeros and the old state.
    """
    given = [index for index, gradient in enumerate(gradients) if gradient is not None]
    finite = norms.everywhere(
        [jnp.all(jnp.isfinite(gradients[index])) for index in given],
        [leaves.split(index) for index in given],
    )
    taken = step_if(finite, inner, leaves, gradients, inner_state, params, **extra_args)
    return finite, *taken


def step_if(
    condition: jax.Array,
    inner: optax.GradientTransformationExtraArgs,
    leaves: Leaves,
    gradients: list[Any],
    inner_state: optax.OptState,
    params: optax.Params | None,
    **extra_args: Any,
) -> tuple[optax.Updates, optax.OptState]:
    """Takes a step of `inner` on a condition, which is the same on all devices.

    Args:
        condition: whether to take the step.
        inner: the transformation.
        leaves: the parameters.
        gradients: the gradient of each, or None.
        inner_state: the state of `inner`.
        params: the parameters as `update` was given them.
        **extra_args: what else `inner` is given.

    Returns:
        The updates in the parameters' dtypes and the state of `inner`; if the step was not taken,
        zeros and the old state.
    """
    given = [index for index, gradient in enumerate(gradients) if gradient is not None]

    def step() -> tuple[list[Any], optax.OptState]:
        updates, new_state = inner.update(
            leaves.rebuild(gradients), inner_state, params, **extra_args
        )
        new = leaves.align("the updates", updates)
        return [new[index].astype(leaves.arrays[index].dtype) for index in given], new_state

    def skip() -> tuple[list[Any], optax.OptState]:
        zeros = [jnp.zeros_like(gradients[i], leaves.arrays[i].dtype) for i in given]
        return zeros, inner_state

    own, new_state = taken_if(condition, step, skip)
    updates: list[Any] = [None] * len(gradients)
    for index, update in zip(given, own, strict=True):
        updates[index] = update
    return leaves.rebuild(updates), new_state


def counted(taken: jax.Array, state: Any, max_in_a_row: int) -> dict[str, jax.Array]:
    """The fields of a wrapper's state that count the steps left out.

    Args:
        taken: whether this step was taken.
        state: the wrapper's state before it.
        max_in_a_row: the number of steps left out in a row that is too many.
    """
    in_a_row = jnp.where(taken, 0, optax.safe_increment(state.skipped_in_a_row))
    return {
        "skipped": jnp.where(taken, state.skipped, optax.safe_increment(state.skipped)),
        "skipped_in_a_row": in_a_row,
        "gave_up": state.gave_up | (in_a_row >= max_in_a_row),
    }
