"""Gradient centralisation."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_largebatch.arguments import check_integer
from optax_largebatch.params.groups import Grouped
from optax_largebatch.params.leaves import Leaves
from optax_largebatch.params.masks import Mask, check_mask, resolve_mask
from optax_largebatch.transforms.link import Leaf, Link, elementwise
from optax_largebatch.transforms.transformation import transformation


def centralize_gradients(
    mask: Mask | Grouped = None, *, output_axis: int = 0
) -> optax.GradientTransformationExtraArgs:
    r"""Subtracts from the gradient of each output unit its mean.

    .. math:: g_k \leftarrow g_k - \operatorname{mean}(g_k)

    for each slice :math:`g_k` along the output axis. Gradients with fewer than two axes pass
    unchanged. Inside `jax.shard_map` the mean is that of the shard: split parameters along the
    output axis alone.

    Args:
        mask: the parameters whose gradients are centralised; None for all, or what
            `ParamGroups.vary("grad_centralization", ...)` returns.
        output_axis: the axis of the output units. 0, the default, is MindSpore's, PyTorch's and
            Equinox's layout (and what `optax.centralize` takes); the kernels of Flax have their
            outputs on the last axis, -1.

    Returns:
        A stateless transformation.

    Raises:
        TypeError: an argument has the wrong type.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import centralize_gradients
        >>> transform = centralize_gradients()
        >>> gradients = jnp.array([[1.0, 3.0], [5.0, 5.0]])
        >>> updates, _ = transform.update(gradients, transform.init(gradients))
        >>> print(updates)
        [[-1.  1.]
         [ 0.  0.]]

    References:
        Yong et al., *Gradient Centralization*, arXiv 2004.01461, equation 1.
    """
    if not isinstance(mask, Grouped):
        check_mask("mask", mask)
    check_integer("output_axis", output_axis, at_least=-1)

    def choices(leaves: Leaves) -> list[bool]:
        if isinstance(mask, Grouped):
            return [mask.values[index] for index in mask.indices(leaves.tree)]
        return resolve_mask("mask", mask, leaves.tree)

    @elementwise
    def leaf(update: jax.Array, at: Leaf) -> tuple[jax.Array, Any]:
        if not at.choice or update.ndim < 2:
            return update, at.state
        output = output_axis % update.ndim
        others = [axis for axis in range(update.ndim) if axis != output]
        return update - jnp.mean(update, axis=others, keepdims=True), at.state

    return transformation(Link(init=lambda params: optax.EmptyState(), leaf=leaf, choices=choices))
