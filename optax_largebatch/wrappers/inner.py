"""The transformation inside a wrapper, and steps of it that are left out on a condition."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax

from optax_largebatch import norms
from optax_largebatch.params.leaves import Leaves

T = TypeVar("T")


def check_inner(inner: Any) -> optax.GradientTransformationExtraArgs:
    """The argument `inner` of a wrapper, in a form that takes extra arguments.

    Raises:
        TypeError: `inner` is no gradient transformation.
    """
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            f"inner must be a gradient transformation, got {inner!r}. Pass one, as lamb(1e-3)."
        )
    return optax.with_extra_args_support(inner)


def switch(
    condition: jax.Array,
    step: Callable[[], T],
    wait: Callable[[], T],
) -> T:
    """The result of `step` or of `wait`; arrays that `wait` passes on stay in place.

    With `jax.lax.cond`, XLA copies these arrays twice, whether the step is taken or not, unless the
    function that passes them on comes first. `jax.lax.switch` lets us choose the order
    (https://github.com/jax-ml/jax/issues/39449).

    Args:
        condition: whether to take the step, shape ().
        step: returns what the step does.
        wait: returns the same kind of result without the step.
    """
    return jax.lax.switch(condition.astype(jnp.int32), [wait, step])


def all_finite(leaves: Leaves, gradients: list[Any]) -> jax.Array:
    """Whether no gradient has an infinity or a NaN, the same on all devices."""
    given = [index for index, gradient in enumerate(gradients) if gradient is not None]
    are_finite = [jnp.all(jnp.isfinite(gradients[index])) for index in given]
    return norms.everywhere(are_finite, list(map(leaves.split, given)))


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
        **extra_args: the extra arguments for `inner`.

    Returns:
        The updates in the parameters' dtypes and the state of `inner`; if the step was not taken,
        zeros and the old state.
    """

    def step() -> tuple[list[Any], optax.OptState]:
        gradient = leaves.rebuild(gradients)
        updates, new_state = inner.update(gradient, inner_state, params, **extra_args)
        pairs = zip(leaves.updates(updates), gradients, strict=True)
        # Some transformations make zeros of a gradient that is None.
        return [None if gradient is None else update for update, gradient in pairs], new_state

    def wait() -> tuple[list[Any], optax.OptState]:
        zeros = leaves.map(lambda x, param: jnp.zeros_like(x, param.dtype), gradients)
        return zeros, inner_state

    updates, new_state = switch(condition, step, wait)
    return leaves.rebuild(updates), new_state
