"""Low-precision parameters that are trained as if they were float32."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_largebatch.arguments import check_dtypes, check_state
from optax_largebatch.engine.to_optax import leaf_transform_of
from optax_largebatch.norms import cast
from optax_largebatch.params.leaves import check_params, gradients_of, leaves_of
from optax_largebatch.wrappers.inner import check_inner


class MasterWeightsState(NamedTuple):
    """State of `master_weights`."""

    master: optax.Params
    """The parameters in full precision. A parameter that has it already has zeros of one byte here,
    so that `optax.tree.map_params` finds an array for each parameter."""
    inner_state: optax.OptState
    """State of the inner transformation, which knows only the float32 copies."""


def master_weights(
    inner: optax.GradientTransformation,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> optax.GradientTransformationExtraArgs:
    r"""Keeps a float32 copy of low-precision parameters and trains this copy.

    A step below half a unit in the last place of a parameter is lost when it is added. In bfloat16
    that is a step of less than 1/512 of the parameter. The float32 copies (masters) add up such
    steps: with :math:`w` the parameter, :math:`m` its master and :math:`f` the inner
    transformation,

    .. math::

        u = (m + f(g, m)) - w, \qquad m \leftarrow w + u, \qquad w \leftarrow \text{round}(w + u)

    `optax.apply_updates` computes the last of these. Norms, decay and moments see gradients and
    parameters in `dtype`. After every step the parameters are exactly the rounded masters, because
    a master is the number that `apply_updates` rounds. If a parameter does not fall by more than
    half in the step, :math:`w + u` is also exactly :math:`m + f(g, m)`; if it does, the two differ
    by a rounding error of float32.

    For that, the updates of low-precision parameters come back in `dtype`. Let this be the
    outermost wrapper: a wrapper around it that casts updates to the parameters' dtype would delay a
    part of each step to the next. Where `jax_numpy_dtype_promotion` is `"strict"`, `apply_updates`
    refuses to add the two dtypes. Use `jax.tree.map(lambda w, u: (w.astype(u.dtype) +
    u).astype(w.dtype), params, updates)` in its place.

    If something else changes the parameters between two steps, the next step sets them back to
    their masters.

    Args:
        inner: the transformation that takes the steps, from this library or any other.
        dtype: dtype of the masters, float32 or float64. Parameters that are as precise need no
            master; their place in the state takes a byte for each element.

    Returns:
        A transformation that needs parameters; its state is a `MasterWeightsState`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `dtype` is less precise than float32.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from optax_largebatch import master_weights
        >>> params = jnp.ones(1, jnp.bfloat16)
        >>> optimizer = master_weights(optax.sgd(0.001))
        >>> state = optimizer.init(params)
        >>> for _ in range(100):
        ...     updates, state = optimizer.update(jnp.ones(1), state, params)
        ...     with jax.numpy_dtype_promotion("standard"):  # the default of jax
        ...         params = optax.apply_updates(params, updates)
        >>> print(params, state.master.round(4))  # optax.sgd alone leaves the parameter at 1
        [0.898438] [0.9]

    References:
        Micikevicius et al., *Mixed Precision Training*, arXiv 1710.03740, section 3.1.
    """
    inner = check_inner(inner)
    check_dtypes(dtype=dtype)
    if dtype is None or jnp.finfo(dtype).bits < 32:
        raise ValueError(f"dtype must be float32 or float64, got {dtype!r}.")

    def is_less_precise(param: jax.Array) -> bool:
        return jnp.finfo(param.dtype).bits < jnp.finfo(dtype).bits

    def readable(gradient: jax.Array, param: jax.Array) -> jax.Array:
        """A gradient as precise as the masters; `inner` may cast it as it reads it."""
        is_cast = is_less_precise(gradient) and leaf_transform_of(inner) is not None
        return cast(gradient, dtype) if is_less_precise(param) and not is_cast else gradient

    def init(params: optax.Params) -> MasterWeightsState:
        leaves = leaves_of("params", params)
        masters = [
            cast(x, dtype) if is_less_precise(x) else jnp.zeros_like(x, dtype=jnp.uint8)
            for x in leaves.arrays
        ]
        return MasterWeightsState(leaves.rebuild(masters), inner.init(precise(leaves, masters)))

    def precise(leaves: Any, masters: list[Any]) -> optax.Params:
        """The masters, and the parameters that need none."""
        trained = leaves.map(lambda master, x: master if is_less_precise(x) else x, masters)
        return leaves.rebuild(trained)

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, Any]:
        check_params("master_weights", "moves them to their masters", params)
        check_state("master_weights", MasterWeightsState, state)
        leaves, gradients = gradients_of(updates, params)
        masters = leaves.alike("the state's master", state.master)
        new, inner_state = inner.update(
            leaves.rebuild(leaves.map(readable, gradients)),
            state.inner_state,
            precise(leaves, masters),
            **extra_args,
        )
        steps = leaves.align("the updates", new)
        for index, (step, param) in enumerate(zip(steps, leaves.arrays, strict=True)):
            if step is None:
                continue
            if is_less_precise(param):
                now = cast(param, dtype)
                steps[index] = masters[index] + cast(step, dtype) - now
                masters[index] = now + steps[index]
            else:
                steps[index] = step.astype(param.dtype)
        return leaves.rebuild(steps), MasterWeightsState(leaves.rebuild(masters), inner_state)

    return optax.GradientTransformationExtraArgs(init, update)
