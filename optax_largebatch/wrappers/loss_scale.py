"""A dynamic loss scale: float16 gradients that neither vanish nor overflow."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_largebatch.arguments import check_integer, check_number, check_state
from optax_largebatch.norms import cast
from optax_largebatch.params.leaves import gradients_of, leaves_of
from optax_largebatch.params.placement import replicated
from optax_largebatch.wrappers.inner import all_finite, check_inner, step_if


class DynamicLossScaleState(NamedTuple):
    """State of `dynamic_loss_scale`."""

    loss_scale: jax.Array
    """The factor for the next loss, shape ()."""
    good_steps: jax.Array
    """Steps taken since the scale last changed, shape (); -1 if the last step was left out."""
    skipped: jax.Array
    """Steps left out so far, shape ()."""
    inner_state: optax.OptState
    """State of the inner transformation."""

    @property
    def left_out(self) -> jax.Array:
        """Whether the last step was left out, shape ()."""
        return self.good_steps < 0


def dynamic_loss_scale(
    inner: optax.GradientTransformation,
    *,
    initial_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
) -> optax.GradientTransformationExtraArgs:
    r"""Divides gradients by the loss scale, and keeps the scale as large as float16 allows.

    Half of the gradients of a network may be too small for float16. The training loop multiplies
    the loss by the scale :math:`s`, which it reads from the state. This wrapper casts the gradients
    to float32 and divides them by :math:`s`.

    .. math::

        g &\leftarrow g / s \\
        s &\leftarrow \begin{cases}
            \max(\text{backoff} \cdot s,\ 1) & \text{if } g \text{ is not finite: no step} \\
            \text{growth} \cdot s & \text{after every } n \text{ steps without a change}
        \end{cases}

    A step whose gradients overflowed changes nothing but the scale: the updates are exact zeros,
    and the moments, counters and schedules of `inner` stay as they were. Inside `jax.shard_map`
    either all devices leave the step out or none does.

    Around `accumulate_gradients`, single micro-batches are left out, and each gradient is divided
    by the scale of its own micro-batch.

    Args:
        inner: the transformation that takes the steps, from this library or any other.
        initial_scale: the factor of the loss at first: if it is too large, some steps are left out
            until it is not. :math:`s`, in [1, 1e38].
        growth_factor: what the scale grows by after `growth_interval` good steps: 2. More than 1.
            The scale does not grow beyond the range of float32.
        backoff_factor: what the scale shrinks by if gradients overflow: 0.5. In (0, 1).
        growth_interval: how many good steps in a row make the scale grow: 2000. :math:`n`, 1 or
            more.

    Returns:
        A transformation; its state is a `DynamicLossScaleState`.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from optax_largebatch import dynamic_loss_scale
        >>> optimizer = dynamic_loss_scale(optax.sgd(0.1))
        >>> params = jnp.array([2.0], jnp.float16)
        >>> state = optimizer.init(params)
        >>> for _ in range(4):
        ...     scale = optax.tree.get(state, "loss_scale")
        ...     scaled_loss = lambda x: scale * jnp.sum(x.astype(jnp.float32) ** 2)
        ...     updates, state = optimizer.update(jax.grad(scaled_loss)(params), state, params)
        ...     print(f"{scale:.0f} {updates[0]:.1f}")  # from 16384 on the gradient overflows
        65536 0.0
        32768 0.0
        16384 0.0
        8192 -0.4

    References:
        Micikevicius et al., *Mixed Precision Training*, arXiv 1710.03740, section 3.2. The
        defaults are those of PyTorch's `GradScaler`.
    """
    inner = check_inner(inner)
    check_number("initial_scale", initial_scale, "[1, 1e38]")
    check_number("growth_factor", growth_factor, "(1, inf)")
    check_number("backoff_factor", backoff_factor, "(0, 1)")
    check_integer("growth_interval", growth_interval, at_least=1)

    def init(params: optax.Params) -> DynamicLossScaleState:
        leaves_of("params", params)
        scale = jnp.asarray(initial_scale, jnp.float32)
        numbers = scale, jnp.zeros([], jnp.int32), jnp.zeros([], jnp.int32)
        return DynamicLossScaleState(*replicated(numbers, params), inner_state=inner.init(params))

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, Any]:
        check_state("dynamic_loss_scale", DynamicLossScaleState, state)
        leaves, gradients = gradients_of(updates, params, extra_args.get("partition_specs"))

        def unscaled(gradient: jax.Array, _: Any) -> jax.Array:
            wide = cast(gradient)  # float32, or what scaling saved would vanish
            return wide / state.loss_scale.astype(wide.dtype)

        gradients = leaves.map(unscaled, gradients)
        finite = all_finite(leaves, gradients)
        new_updates, inner_state = step_if(
            finite, inner, leaves, gradients, state.inner_state, params, **extra_args
        )
        good_steps = jnp.where(finite, jnp.maximum(state.good_steps, 0) + 1, -1)
        grown = state.loss_scale * growth_factor
        grows = (good_steps >= growth_interval) & jnp.isfinite(grown)
        reduced = jnp.maximum(state.loss_scale * backoff_factor, 1)
        kept = jnp.where(finite, state.loss_scale, reduced)
        return new_updates, DynamicLossScaleState(
            loss_scale=jnp.where(grows, grown, kept),
            good_steps=jnp.where(good_steps >= growth_interval, 0, good_steps),
            skipped=jnp.where(finite, state.skipped, optax.safe_increment(state.skipped)),
            inner_state=inner_state,
        )

    return optax.GradientTransformationExtraArgs(init, update)
