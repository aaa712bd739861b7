"""LARS and LARC: layer-wise adaptive rate scaling, and its clipped form."""

from typing import Any

import optax

from optax_largebatch.arguments import Scalar, check_flags, refused, renamed
from optax_largebatch.params.groups import ParamGroups, as_grouped, check_groups
from optax_largebatch.params.masks import Mask
from optax_largebatch.params.stacked import Stacks
from optax_largebatch.transforms.chain import chain
from optax_largebatch.transforms.learning_rate import scale_by_learning_rate
from optax_largebatch.transforms.momentum import accumulate_momentum
from optax_largebatch.transforms.trust_ratio import Denominator, scale_by_lars


@renamed("mask", "weight_decay_mask")
@refused(
    "clip_gradient",
    why="It is an argument of scale_by_lars: write lb.chain(lb.scale_by_lars(...), "
    "lb.scale_by_learning_rate(...), lb.accumulate_momentum(...)).",
)
def lars(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Mask = None,
    trust_coefficient: Scalar = 0.001,
    eps: Scalar = 0.0,
    trust_ratio_mask: Mask = None,
    momentum: Scalar = 0.9,
    nesterov: bool = False,
    *,
    denominator: Denominator = "paper",
    learning_rate_in_momentum: bool = True,
    groups: ParamGroups | None = None,
    stacked: Stacks = None,
    accumulator_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""LARS: SGD with momentum and a rate for each layer, from the norms of its tensors.

    .. math::

        r_t &= \eta_{trust} \frac{\lVert w_t \rVert}
            {\lVert g_t \rVert + \lambda \lVert w_t \rVert + \epsilon} \\
        b_t &= \mu b_{t-1} + \eta\, r_t (g_t + \lambda w_t) \\
        w_{t+1} &= w_t - b_t

    Each norm is taken over one block: an array, or one layer of an array that stacks layers. Where
    one of the norms is 0 the ratio is 1: with the default trust coefficient, that step is 1000
    times the usual one. Leave biases and normalisation scales out with
    `trust_ratio_mask=~matching_kinds("bias", "norm")`.

    With `denominator="update"` it gives the numbers of `optax.lars`.

    Args:
        learning_rate: times `trust_coefficient`, the relative length of a step before momentum: 10
            moves each layer by 1% of its norm. Published for ResNet-50 at a batch of 4096 or more:
            3.2 to 25, with a warm-up. :math:`\eta`, 0 or more; a float or a schedule.
        weight_decay: how much of the parameters is added to the gradient. Typical: 5e-5 to 2e-4 for
            supervised, 1e-6 for self-supervised training. :math:`\lambda`, 0 or more; a float or a
            schedule.
        weight_decay_mask: the parameters that are decayed; None for all. Usually all but biases and
            the scales of norms: `~matching_kinds("bias", "norm")`.
        trust_coefficient: the ratio of a step's length to the norm of the layer, at a learning rate
            of 1: 0.001 in all recipes. :math:`\eta_{trust}`, positive.
        eps: added to the denominator of the ratio, so that layers with tiny gradients move less: 0
            in most recipes, 1e-5 in one. :math:`\epsilon`, 0 or more.
        trust_ratio_mask: the parameters that get a ratio; None for all. The others have ratio 1,
            and so step as in SGD with this learning rate. Usually the same as `weight_decay_mask`:
            biases and scales start at 0 or 1, and their norm says little.
        momentum: share of the buffer that stays in each step: 0.9 in most recipes, up to 0.95.
            :math:`\mu`, in [0, 1).
        nesterov: whether to look one step ahead: False in the recipes.
        denominator: what the ratio divides by: `"paper"` as above; `"update"` for :math:`\lVert g_t
            + \lambda w_t \rVert + \epsilon`, as most self-supervised code has it; for `"squares"`
            see `scale_by_lars`.
        learning_rate_in_momentum: whether :math:`b_t` has the learning rate inside, as above and in
            the paper. False puts it outside, as PyTorch does: :math:`w_{t+1} = w_t - \eta b_t`. The
            two differ whenever the learning rate changes.
        groups: groups of parameters with another learning rate or decay, from
            `param_groups`; None for one group.
        stacked: the parameters that stack layers (`flax.linen.scan`, `nnx.vmap`, experts), so that
            each layer has a norm of its own: patterns with their axes, `{"layers/": 0}`, or the
            result of `stacked_layers`. None if there are none.
        accumulator_dtype: dtype in which :math:`b_t` is kept; None for float32 (float64 for float64
            parameters).

    Returns:
        The optimizer. Its `update` needs the parameters.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from optax_largebatch import lars, matching_kinds
        >>> target = jnp.array([[0.0, 3.0], [4.0, 0.0]])
        >>> def loss_of(params):
        ...     kernel, bias = params["kernel"], params["bias"]
        ...     return jnp.sum((kernel - target) ** 2) + jnp.sum((bias - 1) ** 2)
        >>> params = {"kernel": jnp.array([[3.0, 0.0], [0.0, 4.0]]), "bias": jnp.zeros(2)}
        >>> kernels = ~matching_kinds("bias", "norm")
        >>> optimizer = lars(
        ...     0.1, trust_coefficient=0.1, weight_decay=1e-4, trust_ratio_mask=kernels)
        >>> state = optimizer.init(params)
        >>> for step in range(21):
        ...     loss, grads = jax.value_and_grad(loss_of)(params)
        ...     updates, state = optimizer.update(grads, state, params)
        ...     params = optax.apply_updates(params, updates)
        ...     if step % 5 == 0:
        ...         print(f"loss {loss:.1f}")
        loss 52.0
        loss 41.9
        loss 26.2
        loss 12.8
        loss 3.8

    References:
        You, Gitman and Ginsburg, *Large Batch Training of Convolutional Networks*,
        arXiv 1708.03888, Algorithm 1.
    """
    groups = check_groups(groups, stacked)
    check_flags(learning_rate_in_momentum=learning_rate_in_momentum)
    rate = scale_by_learning_rate(groups.per_group("learning_rate", learning_rate))
    buffer = accumulate_momentum(momentum, nesterov=nesterov, accumulator_dtype=accumulator_dtype)
    return chain(
        scale_by_lars(
            groups.per_group("weight_decay", weight_decay),
            weight_decay_mask=weight_decay_mask,
            trust_coefficient=trust_coefficient,
            eps=eps,
            trust_ratio_mask=trust_ratio_mask,
            denominator=denominator,
            stacked=stacked,
        ),
        *((rate, buffer) if learning_rate_in_momentum else (buffer, rate)),
    )


@renamed("mask", "weight_decay_mask")
def larc(
    learning_rate: optax.ScalarOrSchedule,
    *,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Mask = None,
    trust_coefficient: Scalar = 0.02,
    eps: Scalar = 1e-8,
    trust_ratio_mask: Mask = None,
    momentum: Scalar = 0.9,
    nesterov: bool = False,
    clip: bool = True,
    groups: ParamGroups | None = None,
    stacked: Stacks = None,
    accumulator_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""LARC: LARS that never steps further than plain SGD would.

    .. math::

        r_t &= \min\left(\frac{\eta_{trust}}{\eta} \frac{\lVert w_t \rVert}
            {\lVert g_t \rVert + \lambda \lVert w_t \rVert + \epsilon},\ 1\right) \\
        b_t &= \mu b_{t-1} + r_t (g_t + \lambda w_t) \\
        w_{t+1} &= w_t - \eta b_t

    Where a norm is 0 the gradient is taken as it is, without decay.

    Args:
        learning_rate: the most that multiplies a gradient, as in SGD; layers for which the ratio is
            smaller move less. With `clip=False` see `lars`: 4.8 at a batch of 4096 in SwAV's
            recipe. :math:`\eta`, 0 or more; a float or a schedule.
        weight_decay: how much of the parameters is added to the gradient. Typical: 5e-5 to 2e-4 for
            supervised, 1e-6 for self-supervised training. :math:`\lambda`, 0 or more; a float or a
            schedule.
        weight_decay_mask: the parameters that are decayed; None for all. Usually all but biases and
            the scales of norms: `~matching_kinds("bias", "norm")`.
        trust_coefficient: the longest step, relative to the norm of the layer: 0.02 is Apex's
            default, 0.001 that of all recipes. :math:`\eta_{trust}`, positive.
        eps: added to the denominator of the ratio: 1e-8 in all recipes. :math:`\epsilon`, 0 or
            more.
        trust_ratio_mask: the parameters that get a ratio; None for all. The others have ratio 1,
            and so step as in SGD with this learning rate. Usually the same as `weight_decay_mask`:
            biases and scales start at 0 or 1, and their norm says little.
        momentum: share of the buffer that stays in each step: 0.9 in most recipes, up to 0.95.
            :math:`\mu`, in [0, 1).
        nesterov: whether to look one step ahead: False in the recipes.
        clip: whether the ratio only shortens the steps of SGD. False leaves out the minimum and the
            division by :math:`\eta`, which gives LARS, and is what all recipes have.
        groups: groups of parameters with another learning rate or decay, from
            `param_groups`; None for one group.
        stacked: the parameters that stack layers (`flax.linen.scan`, `nnx.vmap`, experts), so that
            each layer has a norm of its own: patterns with their axes, `{"layers/": 0}`, or the
            result of `stacked_layers`. None if there are none.
        accumulator_dtype: dtype in which :math:`b_t` is kept; None for float32 (float64 for float64
            parameters).

    Returns:
        The optimizer. Its `update` needs the parameters.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from optax_largebatch import larc, matching_kinds
        >>> target = jnp.array([[0.0, 3.0], [4.0, 0.0]])
        >>> def loss_of(params):
        ...     kernel, bias = params["kernel"], params["bias"]
        ...     return jnp.sum((kernel - target) ** 2) + jnp.sum((bias - 1) ** 2)
        >>> params = {"kernel": jnp.array([[3.0, 0.0], [0.0, 4.0]]), "bias": jnp.zeros(2)}
        >>> kernels = ~matching_kinds("bias", "norm")
        >>> optimizer = larc(0.05, weight_decay=1e-4, trust_ratio_mask=kernels)
        >>> state = optimizer.init(params)
        >>> for step in range(16):
        ...     loss, grads = jax.value_and_grad(loss_of)(params)
        ...     updates, state = optimizer.update(grads, state, params)
        ...     params = optax.apply_updates(params, updates)
        ...     if step % 5 == 0:
        ...         print(f"loss {loss:.1f}")
        loss 52.0
        loss 33.6
        loss 11.8
        loss 0.1

    References:
        NVIDIA Apex, `apex.parallel.LARC`; You, Gitman and Ginsburg, arXiv 1708.03888.
    """
    groups = check_groups(groups, stacked)
    check_flags(clip=clip)
    rate = as_grouped("learning_rate", groups.per_group("learning_rate", learning_rate))
    return chain(
        scale_by_lars(
            groups.per_group("weight_decay", weight_decay),
            weight_decay_mask=weight_decay_mask,
            trust_coefficient=trust_coefficient,
            eps=eps,
            trust_ratio_mask=trust_ratio_mask,
            zero_ratio="gradient",
            larc_learning_rate=rate if clip else None,
            stacked=stacked,
        ),
        accumulate_momentum(momentum, nesterov=nesterov, accumulator_dtype=accumulator_dtype),
        scale_by_learning_rate(rate),
    )
