"""The trust ratio of LARS: layer-wise adaptation of the gradient."""

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
    check_optional_number,
    is_zero,
    renamed,
)
from optax_largebatch.engine.blocks import VectorOfBlocks
from optax_largebatch.engine.recorded_states import Facts
from optax_largebatch.engine.requests import Leaf, LeafProgram, block_norms, hoist
from optax_largebatch.engine.state import Counter, declare
from optax_largebatch.engine.to_optax import transformation
from optax_largebatch.engine.transform import LeafTransform
from optax_largebatch.numerics import clip, one_is_zero, positive, root
from optax_largebatch.params.groups import Hyperparameter, as_grouped
from optax_largebatch.params.leaves import Leaves
from optax_largebatch.params.masks import Mask, check_mask, select_leaves
from optax_largebatch.params.stacked import Stacks, check_stacked
from optax_largebatch.transforms.decay import WeightDecay
from optax_largebatch.transforms.trust_ratio import adapted_facts

Denominator = Literal["paper", "update", "squares"]
ZeroRatio = Literal["one", "coefficient", "gradient", "formula"]


class ScaleByLarsState(NamedTuple):
    """State of `scale_by_lars`."""

    count: jax.Array
    """Steps taken, shape ()."""
    trust_ratios: jax.Array
    """The ratios of the last step, one for each block, in the order of `jax.tree.leaves`; for a
    leaf that stacks layers, in the order of its layers."""


class _Scalars(NamedTuple):
    """The numbers of one step."""

    decays: tuple[Any, ...]
    coefficient: Any
    eps: Any
    bounds: Bounds
    limit: Any
    rates: tuple[Any, ...] | None


@renamed(mask="weight_decay_mask")
def scale_by_lars(
    weight_decay: Hyperparameter = 0.0,
    *,
    weight_decay_mask: Mask = None,
    trust_coefficient: Scalar = 0.001,
    eps: Scalar = 0.0,
    trust_ratio_mask: Mask = None,
    denominator: Denominator = "paper",
    trust_ratio_bounds: Bounds = None,
    zero_ratio: ZeroRatio = "one",
    clip_gradient: Scalar | None = None,
    larc_learning_rate: Hyperparameter | None = None,
    stacked: Stacks = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Decays the weights and scales the gradient of each block by its trust ratio.

    .. math::

        r = \eta \frac{\lVert w \rVert}{D + \epsilon}, \qquad
        u = r \, (g + \lambda w), \qquad
        D = \begin{cases}
            \lVert g \rVert + \lambda \lVert w \rVert & \text{"paper"} \\
            \lVert g + \lambda w \rVert & \text{"update"}
        \end{cases}

    and for `"squares"`
    :math:`r = \eta \sqrt{\lVert w \rVert^2 / (\lVert g \rVert^2 + \lambda \lVert w \rVert^2 +
    \epsilon)}`. Where :math:`\lVert w \rVert` or :math:`\lVert g \rVert` is 0, `zero_ratio`
    decides. Where one of them is NaN, :math:`r` is NaN.

    Args:
        weight_decay: how much of the parameters is added to the gradient: 5e-5 to 2e-4 for
            supervised, 1e-6 for self-supervised vision. :math:`\lambda`, 0 or more; a float, a
            schedule, or what `ParamGroups.per_group` returns.
        weight_decay_mask: the parameters that are decayed; None for all. Usually all but biases and
            the scales of norms: `~matching_kinds("bias", "norm")`.
        trust_coefficient: the length of the result, relative to the norm of the layer: 0.001 in all
            recipes. :math:`\eta`, positive.
        eps: added to the denominator of the ratio, so that layers with tiny gradients move less:
            usually 0. :math:`\epsilon`, 0 or more.
        trust_ratio_mask: the parameters that get a ratio; None for all. The others have ratio 1.
            Usually the same as `weight_decay_mask`.
        denominator: what the ratio divides by, :math:`D` above: `"paper"`, `"update"` as in most
            self-supervised code, or `"squares"`.
        trust_ratio_bounds: bounds `(low, high)` on :math:`r`, the coefficient included; either may
            be None. None for no bounds.
        zero_ratio: the ratio where a norm is 0, as of biases that start at 0: `"one"` is 1, which
            is a step as in SGD; `"coefficient"` is :math:`\eta`; `"gradient"` passes the gradient
            on, neither scaled nor decayed; `"formula"` computes the ratio as usual and needs a
            positive `eps`.
        clip_gradient: bound on the magnitude of the elements of :math:`g` in :math:`u`, applied
            after its norm is taken. Positive; None for no clipping.
        larc_learning_rate: the learning rate that a later link multiplies by. The ratio becomes
            :math:`\min(r / \mathrm{lr}, 1)`, so that the step is never longer than without LARS;
            None for no such limit.
        stacked: the parameters that stack layers, so that each layer is treated on its own:
            patterns with their axes, `{"layers/": 0}`, or the result of `stacked_layers`. None if
            there are none.

    Returns:
        A transformation that needs parameters; its state is a `ScaleByLarsState`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import scale_by_lars
        >>> params = jnp.array([3.0, 4.0])
        >>> transform = scale_by_lars(trust_coefficient=0.1)
        >>> updates, state = transform.update(
        ...     jnp.array([0.0, 2.0]), transform.init(params), params)
        >>> print(updates, state.trust_ratios)
        [0.  0.5] [0.25]

    References:
        You, Gitman and Ginsburg, *Large Batch Training of Convolutional Networks*,
        arXiv 1708.03888, equation 6 and Algorithm 1.
    """
    stacks = check_stacked(stacked)
    decay = WeightDecay(weight_decay, weight_decay_mask, stacks)
    check_number("trust_coefficient", trust_coefficient, "(0, inf)")
    check_number("eps", eps, "[0, inf)")
    check_mask("trust_ratio_mask", trust_ratio_mask)
    check_choice("denominator", denominator, ("paper", "update", "squares"))
    check_bounds("trust_ratio_bounds", trust_ratio_bounds)
    check_choice("zero_ratio", zero_ratio, ("one", "coefficient", "gradient", "formula"))
    if zero_ratio == "formula" and is_zero(eps):
        raise ValueError("zero_ratio='formula' divides by eps where both norms are 0; got eps=0.")
    check_optional_number("clip_gradient", clip_gradient, "(0, inf)")
    limits = None
    if larc_learning_rate is not None:
        limits = as_grouped("larc_learning_rate", larc_learning_rate)

    def adapted(params: optax.Params) -> list[bool]:
        return select_leaves("trust_ratio_mask", trust_ratio_mask, stacks.blocks(params))

    ratio_facts = adapted_facts(adapted, trust_ratio_bounds)

    def facts(params: optax.Params) -> list[Facts]:
        columns = zip(decay.facts(params), ratio_facts(params), strict=True)
        return [{**one, **other} for one, other in columns]

    def scalars(state: ScaleByLarsState) -> _Scalars:
        return _Scalars(
            decay.values.at(state.count),
            trust_coefficient,
            eps,
            trust_ratio_bounds,
            clip_gradient,
            None if limits is None else limits.at(state.count),
        )

    def choices(leaves: Leaves) -> list[Any]:
        flags = adapted(leaves.tree)
        indices = [0] * len(flags) if limits is None else limits.indices(leaves.tree)
        return list(zip(decay.choices(leaves.tree), flags, indices, strict=True))

    def leaf(gradient: jax.Array, at: Leaf) -> LeafProgram:
        step: _Scalars = at.scalars
        coefficient, eps, limit = step.coefficient, step.eps, step.limit
        decay_index, is_adapted, rate_index = at.choice
        clipped = gradient if limit is None else jnp.clip(gradient, -limit, limit)
        update = decay.add(clipped, at.param, step.decays, decay_index)
        if not is_adapted:
            return update, at.state._replace(trust_ratios=1.0)

        direction = update if denominator == "update" else gradient
        param_norm, norm = yield block_norms(at.param, direction)
        wd = decay.of(step.decays, decay_index)
        if denominator == "squares":
            squares = jnp.square(norm) + wd * jnp.square(param_norm) + eps
            ratio = coefficient * root(jnp.square(param_norm) / positive(squares))
        else:
            length = norm + eps if denominator == "update" else norm + wd * param_norm + eps
            ratio = coefficient * param_norm / positive(length)
        ratio = clip(ratio, step.bounds)
        undefined = one_is_zero(param_norm, norm)
        if zero_ratio != "formula":
            ratio = jnp.where(undefined, coefficient if zero_ratio == "coefficient" else 1.0, ratio)
        if step.rates is not None:
            rate = step.rates[rate_index]
            ratio = jnp.where(ratio >= rate, 1.0, ratio / rate)  # a ratio of NaN stays NaN
        if zero_ratio == "gradient":
            ratio = jnp.where(undefined, 1.0, ratio)
            update = jnp.where(undefined, gradient, update)
        (ratio,) = yield hoist(ratio)
        return ratio * update, at.state._replace(trust_ratios=ratio)

    return transformation(
        LeafTransform(
            leaf,
            state=declare(
                ScaleByLarsState, count=Counter(), trust_ratios=VectorOfBlocks(initial=1.0)
            ),
            scalars=scalars,
            choices=choices,
            needs_params=True,
            stacked=stacks,
            given="parts",
            facts=facts,
        )
    )
