"""Gradient centralisation."""

import jax
import optax

from optax_largebatch import engine
from optax_largebatch.arguments import check_integer
from optax_largebatch.norms import other_axes
from optax_largebatch.params.leaves import Leaves
from optax_largebatch.params.masks import Mask, check_mask, select_leaves
from optax_largebatch.params.shapes import Axes
from optax_largebatch.params.stacked import Stacks, check_stacked


def centralize_gradients(
    mask: Mask = None,
    *,
    output_axis: int = 0,
    stacked: Stacks = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Subtracts the mean from the gradient of each output unit.

    .. math:: g_k \leftarrow g_k - \operatorname{mean}(g_k)

    for each slice :math:`g_k` along the output axis. Gradients with fewer than two axes pass
    unchanged.

    Args:
        mask: the parameters whose gradients are centralised; None for all.
        output_axis: the axis of the output units. 0, the default, is MindSpore's, PyTorch's and
            Equinox's layout (and what `optax.centralize` takes); the kernels of Flax have their
            outputs on the last axis, -1. Stacked axes are not counted.
        stacked: the parameters that stack layers, so that each layer is treated on its own:
            patterns with their axes, `{"layers/": 0}`, or the result of `stacked_layers`. None if
            there are none.

    Returns:
        A stateless transformation.

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
    check_mask("mask", mask)
    check_integer("output_axis", output_axis, at_least=-1)

    stacks = check_stacked(stacked, segments=False)

    def choices(leaves: Leaves) -> list[Axes | None]:
        """The axes that are not averaged over, None for a leaf that passes."""
        chosen = select_leaves("mask", mask, stacks.blocks(leaves.tree))
        kept: list[Axes | None] = [None] * len(chosen)
        for index, axes in enumerate(stacks.axes(leaves.tree)):
            others = other_axes(leaves.arrays[index].ndim, axes)
            if chosen[index] and len(others) >= 2:
                kept[index] = (*axes, others[output_axis % len(others)])
        return kept

    def leaf(update: jax.Array, at: engine.Leaf) -> engine.LeafProgram:
        if at.choice is None:
            return update, at.state
        (mean,) = yield engine.block_means(update, kept=at.choice)
        return update - mean, at.state

    return engine.transformation(leaf, choices=choices, given="parts")
