"""The trust ratio of LAMB and LANS: layer-wise adaptation of the step."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_largebatch.arguments import (
    Bounds,
    Scalar,
    check_bounds,
    check_choice,
    check_number,
    is_zero,
)
from optax_largebatch.engine.blocks import VectorOfBlocks
from optax_largebatch.engine.recorded_states import Facts, FactsOf
from optax_largebatch.engine.requests import Leaf, LeafProgram, block_norms, hoist
from optax_largebatch.engine.state import declare
from optax_largebatch.engine.to_optax import transformation
from optax_largebatch.engine.transform import LeafTransform
from optax_largebatch.numerics import clip, one_is_zero
from optax_largebatch.params.masks import Mask, check_mask, select_leaves
from optax_largebatch.params.stacked import Stacks, check_stacked


class ScaleByTrustRatioState(NamedTuple):
    """State of `scale_by_trust_ratio`."""

    trust_ratios: jax.Array
    """The ratios of the last step, one for each block, in the order of `jax.tree.leaves`; for a
    leaf that stacks layers, in the order of its layers."""


class _Scalars(NamedTuple):
    """The numbers of one step."""

    norm_bounds: Bounds
    coefficient: Any
    eps: Any
    param_norm_bounds: Bounds
    ratio_bounds: Bounds


def scale_by_trust_ratio(
    min_norm: Scalar = 0.0,
    trust_coefficient: Scalar = 1.0,
    eps: Scalar = 0.0,
    *,
    param_norm_bounds: Bounds = None,
    trust_ratio_bounds: Bounds = None,
    zero_ratio: Literal["one", "coefficient"] = "one",
    trust_ratio_mask: Mask = None,
    stacked: Stacks = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Gives the update of each block the length of the block's parameters.

    .. math::

        r = \operatorname{clip}\left(c \, \frac{\phi(\lVert w \rVert)}{\lVert u \rVert + \epsilon}
            \right), \qquad u \leftarrow r u,

    with :math:`\phi(z) = \min(\max(z, \mathrm{lo}), \mathrm{hi})`. Norms below `min_norm` count as
    `min_norm`. Where
    :math:`\phi(\lVert w \rVert)` or :math:`\lVert u \rVert` is 0 there is no ratio, and
    `zero_ratio` decides. Where one of them is NaN, :math:`r` is NaN.

    With the arguments of `optax.scale_by_trust_ratio`, it gives the numbers of
    `optax.scale_by_trust_ratio`.

    Args:
        min_norm: lowest value of both norms, 0 or more. With a positive one, parameters that start
            at zero are adapted too.
        trust_coefficient: how long the result is, relative to the parameters: 1 in LAMB and LANS,
            0.001 to 0.02 in LARS. :math:`c`, positive.
        eps: added to :math:`\lVert u \rVert`, so that layers with tiny updates move less: usually
            0. :math:`\epsilon`, 0 or more.
        param_norm_bounds: bounds `(lo, hi)` on the norm of a layer where it sets the length, as in
            :math:`\phi`: `(None, 10.0)` in NVIDIA's Transformer-XL. Either may be None for no
            bound. With a positive `lo` parameters that start at zero are adapted too.
        trust_ratio_bounds: bounds on :math:`r`, in the form of `param_norm_bounds`: `(None, 1.0)`
            only shortens, as LAMBC. They do not apply where `zero_ratio` decides.
        zero_ratio: what happens where a norm is 0, as of biases that start at 0: `"one"` takes the
            update as it is, `"coefficient"` takes :math:`r = c`.
        trust_ratio_mask: the parameters that are adapted; None for all. The others pass unchanged,
            with ratio 1. Usually all but biases and the scales of norms.
        stacked: the parameters that stack layers, so that each layer is treated on its own:
            patterns with their axes, `{"layers/": 0}`, or the result of `stacked_layers`. None if
            there are none.

    Returns:
        A transformation that needs parameters; its state is a `ScaleByTrustRatioState`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import scale_by_trust_ratio
        >>> params = {"kernel": jnp.array([3.0, 4.0]), "bias": jnp.zeros(2)}
        >>> updates = {"kernel": jnp.array([0.0, 2.0]), "bias": jnp.ones(2)}
        >>> transform = scale_by_trust_ratio()
        >>> updates, state = transform.update(updates, transform.init(params), params)
        >>> print(updates["kernel"], updates["bias"], state.trust_ratios)
        [0. 5.] [1. 1.] [1.  2.5]

    References:
        You et al., *Large Batch Optimization for Deep Learning: Training BERT in 76 minutes*,
        arXiv 1904.00962, Algorithm 2 and, for :math:`\phi`, section 3.
    """
    check_number("min_norm", min_norm, "[0, inf)")
    check_number("trust_coefficient", trust_coefficient, "(0, inf)")
    check_number("eps", eps, "[0, inf)")
    check_bounds("param_norm_bounds", param_norm_bounds)
    check_bounds("trust_ratio_bounds", trust_ratio_bounds)
    check_choice("zero_ratio", zero_ratio, ("one", "coefficient"))
    check_mask("trust_ratio_mask", trust_ratio_mask)
    stacks = check_stacked(stacked)
    norm_bounds = None if is_zero(min_norm) else (min_norm, None)

    def adapted(params: optax.Params) -> list[bool]:
        return select_leaves("trust_ratio_mask", trust_ratio_mask, stacks.blocks(params))

    def leaf(update: jax.Array, at: Leaf) -> LeafProgram:
        if not at.choice:
            return update, at.state._replace(trust_ratios=1.0)
        step: _Scalars = at.scalars
        param_norm, update_norm = yield block_norms(at.start, update)
        param_norm = clip(clip(param_norm, step.norm_bounds), step.param_norm_bounds)
        update_norm = clip(update_norm, step.norm_bounds)
        undefined = one_is_zero(param_norm, update_norm)
        ratio = step.coefficient * param_norm / (jnp.where(undefined, 1, update_norm) + step.eps)
        fallback = step.coefficient if zero_ratio == "coefficient" else 1.0
        (ratio,) = yield hoist(jnp.where(undefined, fallback, clip(ratio, step.ratio_bounds)))
        return ratio * update, at.state._replace(trust_ratios=ratio)

    return transformation(
        LeafTransform(
            leaf,
            state=declare(ScaleByTrustRatioState, trust_ratios=VectorOfBlocks(initial=1.0)),
            scalars=lambda state: _Scalars(
                norm_bounds, trust_coefficient, eps, param_norm_bounds, trust_ratio_bounds
            ),
            choices=lambda leaves: adapted(leaves.tree),
            needs_params=True,
            stacked=stacks,
            given="parts",
            facts=adapted_facts(adapted, trust_ratio_bounds),
        )
    )


def adapted_facts(adapted: Callable[[optax.Params], list[bool]], bounds: Bounds) -> FactsOf:
    """What readers of a run want to know of a trust ratio.

    Args:
        adapted: from the parameters to whether each has a ratio.
        bounds: the bounds on it.
    """
    own: Facts = {"length": "trust ratio", "bounds": bounds}
    return lambda params: [own if flag else {} for flag in adapted(params)]
