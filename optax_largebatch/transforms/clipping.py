"""Clipping of the gradient, by value and by its norm over all parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_largebatch import engine
from optax_largebatch.arguments import Scalar, check_optional_number, renamed


@renamed("max_delta", "max_value")
def clip_by_value(max_value: Scalar | None) -> optax.GradientTransformationExtraArgs:
    r"""Clips every element of the gradient to :math:`[-c, c]`.

    Like `optax.clip`, but None stands for no clipping, so that a chain keeps its state layout.

    Args:
        max_value: the largest magnitude of an element, in units of the gradient. :math:`c`,
            positive; None for no clipping.

    Returns:
        A stateless transformation.

    Raises:
        TypeError: `max_value` is no number.
        ValueError: `max_value` is not positive.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import clip_by_value
        >>> transform = clip_by_value(1.0)
        >>> updates, _ = transform.update(jnp.array([0.5, -3.0]), transform.init(jnp.zeros(2)))
        >>> print(updates)
        [ 0.5 -1. ]
    """
    check_optional_number("max_value", max_value)

    def leaf(update: jax.Array, at: engine.Leaf) -> tuple[jax.Array, Any]:
        limit = at.scalars
        return update if limit is None else jnp.clip(update, -limit, limit), at.state

    return engine.transformation(
        leaf, scalars=lambda state: max_value, given="parts", takes_complex=max_value is None
    )


def clip_by_global_norm(max_norm: Scalar | None) -> optax.GradientTransformationExtraArgs:
    r"""Shrinks the gradient where its norm over all parameters exceeds a bound.

    .. math:: g \leftarrow \frac{g}{\max(1, \lVert g \rVert / c)}

    Like `optax.clip_by_global_norm`, but the norm is accumulated like every norm of this library,
    and None stands for no clipping, so that a chain keeps its state layout.

    Args:
        max_norm: the largest norm of the whole gradient: 1.0 in most recipes of LAMB. Above it, all
            elements shrink by the same factor. :math:`c`, positive; None for no clipping.

    Returns:
        A stateless transformation.

    Raises:
        TypeError: `max_norm` is no number.
        ValueError: `max_norm` is not positive.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import clip_by_global_norm
        >>> transform = clip_by_global_norm(1.0)
        >>> gradients = {"kernel": jnp.array([3.0]), "bias": jnp.array([4.0])}
        >>> updates, _ = transform.update(gradients, transform.init(gradients))
        >>> print(updates["kernel"], updates["bias"])
        [0.6] [0.8]
    """
    check_optional_number("max_norm", max_norm)

    def leaf(update: jax.Array, at: engine.Leaf) -> engine.LeafProgram:
        if at.scalars is None:
            return update, at.state
        (norm,) = yield engine.global_norm(update)
        (divisor,) = yield engine.hoist(jnp.maximum(norm / at.scalars, 1))
        return update / divisor, at.state

    return engine.transformation(
        leaf, scalars=lambda state: max_norm, given="parts", takes_complex=True
    )
