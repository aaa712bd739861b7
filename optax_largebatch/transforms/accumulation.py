"""Macro-batches: many micro-batches for one step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_largebatch.arguments import check_dtype, check_integer
from optax_largebatch.params.leaves import gradients_of, leaves_of
from optax_largebatch.transforms.adam import zeros_like


class AccumulateGradientsState(NamedTuple):
    """State of `accumulate_gradients`."""

    micro_step: jax.Array
    """Micro-batches in the accumulator, shape ()."""
    macro_step: jax.Array
    """Steps of the inner transformation, shape ()."""
    accumulator: optax.Updates
    """Sum of the gradients since the last step, like the parameters."""
    inner_state: optax.OptState
    """State of the inner transformation."""


def accumulate_gradients(
    inner: optax.GradientTransformation,
    every: int,
    *,
    accumulator_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Takes one step of `inner` for every macro-batch, with the mean gradient of its parts.

    Between two steps the updates are exact zeros and `inner` is not computed at all. Its schedules
    count macro-batches.

    Args:
        inner: the transformation, from this library or any other.
        every: micro-batches in a macro-batch, 1 or more.
        accumulator_dtype: dtype of the sum; None for float32 (float64 for float64 parameters).

    Returns:
        A transformation; its state is an `AccumulateGradientsState`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `every` is less than 1.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from optax_largebatch import accumulate_gradients
        >>> optimizer = accumulate_gradients(optax.sgd(1.0), every=2)
        >>> params = jnp.zeros(1)
        >>> state = optimizer.init(params)
        >>> for gradient in (1.0, 3.0):
        ...     updates, state = optimizer.update(jnp.array([gradient]), state, params)
        ...     print(updates)
        [0.]
        [-2.]
    """
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(f"inner must be a gradient transformation, got {inner!r}.")
    check_integer("every", every, at_least=1)
    check_dtype("accumulator_dtype", accumulator_dtype)
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> AccumulateGradientsState:
        leaves_of("params", params)
        return AccumulateGradientsState(
            micro_step=jnp.zeros([], jnp.int32),
            macro_step=jnp.zeros([], jnp.int32),
            accumulator=zeros_like(params, accumulator_dtype),
            inner_state=inner.init(params),
        )

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, AccumulateGradientsState]:
        leaves, gradients = gradients_of(updates, params)

        def inner_step(mean: list[Any]) -> tuple[optax.Updates, AccumulateGradientsState]:
            new_updates, inner_state = inner.update(
                leaves.rebuild(mean), state.inner_state, params, **extra_args
            )
            columns = zip(leaves.align("the updates", new_updates), leaves.arrays, strict=True)
            return leaves.rebuild(
                [
                    update if update is None else update.astype(like.dtype)
                    for update, like in columns
                ]
            ), AccumulateGradientsState(
                micro_step=jnp.zeros([], jnp.int32),
                macro_step=jnp.asarray(optax.safe_increment(state.macro_step)),
                accumulator=jax.tree.map(jnp.zeros_like, state.accumulator),
                inner_state=inner_state,
            )

        if every == 1:  # a macro-batch of one is its own mean, and nothing is ever summed
            new_updates, new_state = inner_step(gradients)
            return new_updates, new_state._replace(accumulator=state.accumulator)

        sums = leaves.align("the state's accumulator", state.accumulator)
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                sums[index] = sums[index] + gradient.astype(sums[index].dtype)

        def with_gradient(parts: list[Any]) -> list[Any]:
            given = zip(parts, gradients, strict=True)
            return [None if gradient is None else part for part, gradient in given]

        def step() -> tuple[optax.Updates, AccumulateGradientsState]:
            return inner_step(with_gradient([total / every for total in sums]))

        def wait() -> tuple[optax.Updates, AccumulateGradientsState]:
            zeros = with_gradient([jnp.zeros_like(leaf) for leaf in leaves.arrays])
            return leaves.rebuild(zeros), state._replace(
                micro_step=state.micro_step + 1, accumulator=leaves.rebuild(sums)
            )

        return jax.lax.cond(state.micro_step + 1 >= every, step, wait)

    return optax.GradientTransformationExtraArgs(init, update)
