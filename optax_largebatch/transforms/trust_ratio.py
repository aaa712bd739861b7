"""The trust ratios of LAMB, LANS and LARS: the length of the step of each block."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from optax_largebatch import arguments, engine
from optax_largebatch.arguments import Bounds, Scalar, renamed
from optax_largebatch.engine.recorded_states import Facts
from optax_largebatch.numerics import clip, one_is_zero, positive, root
from optax_largebatch.params.groups import Hyperparameter, as_grouped
from optax_largebatch.params.leaves import Leaves
from optax_largebatch.params.masks import Mask, check_mask, select_leaves
from optax_largebatch.params.stacked import Stacked, Stacks, check_stacked
from optax_largebatch.transforms.decay import WeightDecay


class ScaleByTrustRatioState(NamedTuple):
    """State of `scale_by_trust_ratio`."""

    trust_ratios: jax.Array
    """The ratios of the last step, one for each block, in the order of `jax.tree.leaves`; for a
    leaf that stacks layers, in the order of its layers."""


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
    arguments.check_numbers("[0, inf)", min_norm=min_norm, eps=eps)
    arguments.check_numbers("(0, inf)", trust_coefficient=trust_coefficient)
    arguments.check_bounds("param_norm_bounds", param_norm_bounds)
    arguments.check_bounds("trust_ratio_bounds", trust_ratio_bounds)
    arguments.check_choice("zero_ratio", zero_ratio, ("one", "coefficient"))
    stacks = check_stacked(stacked)
    adapted = adapted_leaves(trust_ratio_mask, stacks)
    norm_bounds = None if arguments.is_zero(min_norm) else (min_norm, None)
    scalars = (norm_bounds, trust_coefficient, eps, param_norm_bounds, trust_ratio_bounds)

    def leaf(update: jax.Array, at: engine.Leaf) -> engine.LeafProgram:
        if not at.choice:
            return update, at.state._replace(trust_ratios=1.0)
        norm_bounds, coefficient, eps, param_norm_bounds, ratio_bounds = at.scalars
        param_norm, update_norm = yield engine.block_norms(at.start, update)
        param_norm = clip(clip(param_norm, norm_bounds), param_norm_bounds)
        update_norm = clip(update_norm, norm_bounds)
        undefined = one_is_zero(param_norm, update_norm)
        ratio = trust_ratio(param_norm, update_norm + eps, coefficient, ratio_bounds)
        at_zero = coefficient if zero_ratio == "coefficient" else 1.0
        (ratio,) = yield engine.hoist(jnp.where(undefined, at_zero, ratio))
        return ratio * update, at.state._replace(trust_ratios=ratio)

    return engine.transformation(
        leaf,
        state=engine.declare(
            ScaleByTrustRatioState, trust_ratios=engine.VectorOfBlocks(initial=1.0)
        ),
        scalars=lambda state: scalars,
        choices=lambda leaves: adapted(leaves.tree),
        needs_params=True,
        stacked=stacks,
        given="parts",
        takes_complex=True,
        facts=lambda params: ratio_facts(adapted(params), trust_ratio_bounds),
    )


def trust_ratio(
    param_norm: jax.Array,
    length: jax.Array,
    coefficient: Scalar,
    bounds: Bounds,
) -> jax.Array:
    """The norm of the parameters over the length of a step; a length of 0 counts as 1."""
    return clip(coefficient * param_norm / positive(length), bounds)


def adapted_leaves(
    mask: Mask,
    stacks: Stacked,
) -> Callable[[optax.Params], list[bool]]:
    """From the parameters to whether `trust_ratio_mask` chooses each, after checking the mask."""
    check_mask("trust_ratio_mask", mask)
    return lambda params: select_leaves("trust_ratio_mask", mask, stacks.blocks(params))


def ratio_facts(adapted: list[bool], bounds: Bounds) -> list[Facts]:
    """What readers of a run want to know of trust ratios with these bounds."""
    facts: Facts = {"length": "trust ratio", "bounds": bounds}
    return [facts if flag else {} for flag in adapted]


Denominator = Literal["paper", "update", "squares"]
ZeroRatio = Literal["one", "coefficient", "gradient", "formula"]


class ScaleByLarsState(NamedTuple):
    """State of `scale_by_lars`."""

    count: jax.Array
    """Steps taken, shape ()."""
    trust_ratios: jax.Array
    """The ratios of the last step, one for each block, in the order of `jax.tree.leaves`; for a
    leaf that stacks layers, in the order of its layers."""


@renamed("mask", "weight_decay_mask")
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
    adapted = adapted_leaves(trust_ratio_mask, stacks)
    arguments.check_numbers("(0, inf)", trust_coefficient=trust_coefficient)
    arguments.check_numbers("[0, inf)", eps=eps)
    arguments.check_choice("denominator", denominator, get_args(Denominator))
    arguments.check_bounds("trust_ratio_bounds", trust_ratio_bounds)
    arguments.check_choice("zero_ratio", zero_ratio, get_args(ZeroRatio))
    if zero_ratio == "formula" and arguments.is_zero(eps):
        raise ValueError("zero_ratio='formula' divides by eps where both norms are 0; got eps=0.")
    arguments.check_optional_number("clip_gradient", clip_gradient)
    is_larc = larc_learning_rate is not None
    limits = as_grouped("larc_learning_rate", larc_learning_rate if is_larc else 1.0)
    constants = (trust_coefficient, eps, trust_ratio_bounds, clip_gradient)

    def facts(params: optax.Params) -> list[Facts]:
        ratios = ratio_facts(adapted(params), trust_ratio_bounds)
        return [{**a, **b} for a, b in zip(decay.facts(params), ratios, strict=True)]

    def scalars(state: ScaleByLarsState) -> tuple[Any, ...]:
        return constants, decay.values.at(state.count), limits.at(state.count)

    def choices(leaves: Leaves) -> list[Any]:
        tree = leaves.tree
        return list(zip(decay.choices(tree), adapted(tree), limits.indices(tree), strict=True))

    def leaf(gradient: jax.Array, at: engine.Leaf) -> engine.LeafProgram:
        (coefficient, eps, bounds, limit), decays, rates = at.scalars
        decay_index, is_adapted, rate_index = at.choice
        wd = 0.0 if decay_index is None else decays[decay_index]
        update = gradient if limit is None else jnp.clip(gradient, -limit, limit)
        if decay_index is not None:
            update = update + wd * at.param
        if not is_adapted:
            return update, at.state._replace(trust_ratios=1.0)

        direction = update if denominator == "update" else gradient
        param_norm, norm = yield engine.block_norms(at.param, direction)
        if denominator == "squares":
            squares = jnp.square(norm) + wd * jnp.square(param_norm) + eps
            ratio = clip(coefficient * root(jnp.square(param_norm) / positive(squares)), bounds)
        else:
            length = norm + eps if denominator == "update" else norm + wd * param_norm + eps
            ratio = trust_ratio(param_norm, length, coefficient, bounds)
        undefined = one_is_zero(param_norm, norm)
        if zero_ratio != "formula":
            ratio = jnp.where(undefined, coefficient if zero_ratio == "coefficient" else 1.0, ratio)
        if is_larc:
            rate = rates[rate_index]
            ratio = jnp.where(ratio >= rate, 1.0, ratio / rate)  # a ratio of NaN stays NaN
        if zero_ratio == "gradient":
            ratio = jnp.where(undefined, 1.0, ratio)
            update = jnp.where(undefined, gradient, update)
        (ratio,) = yield engine.hoist(ratio)
        return ratio * update, at.state._replace(trust_ratios=ratio)

    return engine.transformation(
        leaf,
        state=engine.declare(
            ScaleByLarsState,
            count=engine.Counter(),
            trust_ratios=engine.VectorOfBlocks(initial=1.0),
        ),
        scalars=scalars,
        choices=choices,
        needs_params=True,
        stacked=stacks,
        given="parts",
        takes_complex=clip_gradient is None,
        facts=facts,
    )
