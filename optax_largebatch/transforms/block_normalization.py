"""Normalisation of each block of the gradient."""

import jax
import jax.numpy as jnp
import optax

from optax_largebatch import engine
from optax_largebatch.arguments import Scalar, check_number
from optax_largebatch.params.stacked import Stacks, check_stacked


def normalize_by_block_norm(
    eps: Scalar = 0.0,
    *,
    stacked: Stacks = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Divides the gradient of each block by its norm.

    .. math:: g \leftarrow \frac{g}{\lVert g \rVert + \epsilon}

    A block whose gradient is zero stays zero. In float32 the norm has to lie between 1e-15 and
    1e18. Below, the squares count as 0, and the gradient stays as it is. Above, they count as
    infinite, and the gradient becomes 0.

    Args:
        eps: added to the norm, so that layers with tiny gradients get less than length 1: 0 in
            LANS, 1e-6 in Apex. :math:`\epsilon`, 0 or more.
        stacked: the parameters that stack layers, so that each layer is treated on its own:
            patterns with their axes, `{"layers/": 0}`, or the result of `stacked_layers`. None if
            there are none.

    Returns:
        A stateless transformation.

    Raises:
        TypeError: `eps` is no number.
        ValueError: `eps` is negative.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import normalize_by_block_norm
        >>> transform = normalize_by_block_norm()
        >>> gradients = {"kernel": jnp.array([3.0, 4.0]), "bias": jnp.zeros(2)}
        >>> updates, _ = transform.update(gradients, transform.init(gradients))
        >>> print(updates["kernel"], updates["bias"])
        [0.6 0.8] [0. 0.]

    References:
        Zheng et al., *Accelerated Large Batch Optimization of BERT Pretraining in 54 minutes*,
        arXiv 2006.13484, Algorithm 2, line 6.
    """
    check_number("eps", eps, "[0, inf)")
    stacks = check_stacked(stacked)

    def leaf(update: jax.Array, at: engine.Leaf) -> engine.LeafProgram:
        (norm,) = yield engine.block_norms(update)
        (scale,) = yield engine.hoist(1 / jnp.where(norm > 0, norm + at.scalars, 1))
        return update * scale, at.state

    return engine.transformation(
        leaf, scalars=lambda state: eps, stacked=stacks, given="parts", takes_complex=True
    )
