"""The optimizers of icefall: ScaledAdam, Eve, Cain, and the experimental LearnedGradient."""

from typing import Any

import optax

from optax_largebatch import arguments
from optax_largebatch.arguments import Scalar, refused, renamed, without_nu_dtype
from optax_largebatch.params.groups import ParamGroups, check_groups
from optax_largebatch.params.masks import Mask
from optax_largebatch.params.stacked import Stacks
from optax_largebatch.transforms.adam import scale_by_adam, scale_by_second_moment
from optax_largebatch.transforms.chain import chain, sum_of
from optax_largebatch.transforms.clamping import clamp_parameters
from optax_largebatch.transforms.decay import decay_to_target_rms
from optax_largebatch.transforms.learned_matrices import scale_by_learned_matrices
from optax_largebatch.transforms.learning_rate import scale_by_learning_rate
from optax_largebatch.transforms.median_clipping import clip_by_median_norm
from optax_largebatch.transforms.momentum import accumulate_momentum
from optax_largebatch.transforms.parameter_scale.factored_parameter_rms import (
    scale_by_factored_parameter_rms,
)
from optax_largebatch.transforms.parameter_scale.log_scale import learn_log_scale
from optax_largebatch.transforms.parameter_scale.parameter_rms import scale_by_parameter_rms


@refused(
    scalar_max="Single numbers are clamped to [-10, 10], as in icefall.",
    size_update_period="Sizes are updated every 4 steps, as in icefall.",
    clipping_update_period="The median is that of 100 norms. Chain clip_by_median_norm for others.",
)
@without_nu_dtype
def scaled_adam(
    learning_rate: Scalar | optax.Schedule = 0.03,
    *,
    b1: Scalar = 0.9,
    b2: Scalar = 0.98,
    eps: Scalar = 1e-8,
    clipping_scale: Scalar | None = None,
    scalar_lr_scale: Scalar = 0.1,
    param_min_rms: Scalar = 1e-5,
    param_max_rms: Scalar = 3.0,
    groups: ParamGroups | None = None,
    stacked: Stacks = None,
    mu_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""ScaledAdam: Adam with steps relative to the size of each tensor, which is learned too.

    .. math::

        v_t &= b_2 v_{t-1} + (1 - b_2) g_t^2, \qquad r = \operatorname{rms}(w) \\
        D_t &= -\eta \, \max(r, r_{\min}) \, \frac{g_t}{\sqrt{v_t / (1 - b_2^t)} + \epsilon}
            + \sigma_t w_t \\
        w_{t+1} &= w_t + \Delta_t, \qquad \Delta_t = b_1 \Delta_{t-1} + (1 - b_1) D_t

    Every four steps :math:`r` is measured again, and :math:`\sigma_t` is a step of RMSprop on
    the logarithm of the block's scale (see `learn_log_scale`), at most 0.1. A block is an array, or
    one layer of an array that stacks layers. This step does not shrink a block below
    :math:`r_{\min}` or grow it beyond :math:`r_{\max}`. In all other steps :math:`\sigma_t = 0`.
    Blocks of one element have no size: they move by :math:`\eta` times `scalar_lr_scale` and are
    clamped to :math:`[-10, 10]`.

    The learning rate is a relative change, the same for small and large tensors, so it needs no
    tuning to the size of the model. ScaledAdam was made for the schedule `eden` (or `eden2`), and
    is used with `clipping_scale=2.0`.

    Args:
        learning_rate: relative change of a parameter in a step: 0.03 changes each by some 3% of its
            root mean square. 0.045 in icefall, with `eden`. :math:`\eta`, 0 or more; a float or a
            schedule.
        b1: decay rate of the momentum: 0.9 in icefall. In [0, 1).
        b2: decay rate of the second moments, an average over about :math:`1 / (1 - b_2)` steps:
            0.98 in icefall. In [0, 1).
        eps: keeps the division finite where the gradient has been near 0: 1e-8 in icefall.
            :math:`\epsilon`, 0 or more; with 0, :math:`0/0` counts as 0.
        clipping_scale: bound on the norm of the whole gradient, relative to the median of its
            recent norms (see `clip_by_median_norm`): 2.0 in icefall. Positive; None for no
            clipping.
        scalar_lr_scale: factor of the learning rate for blocks of one element and for the learned
            sizes, which are better moved slowly: 0.1 in icefall. 0 or more.
        param_min_rms: least size that a step is measured against, so that parameters that start at
            zero move; raise it if they take too long. :math:`r_{\min}`, positive.
        param_max_rms: size, as root mean square, above which a parameter shrinks: 3 in icefall.
            :math:`r_{\max}`, positive.
        groups: groups of parameters with another learning rate, from `param_groups`; None for one
            group. There is no weight decay.
        stacked: the parameters that stack layers (`flax.linen.scan`, `nnx.vmap`, experts), so that
            each layer has a norm of its own: patterns with their axes, `{"layers/": 0}`, or the
            result of `stacked_layers`. None if there are none.
        mu_dtype: dtype in which the first moment is kept: bfloat16 saves two bytes for each
            parameter. None for float32 (float64 for float64 parameters).

    Returns:
        The optimizer. Its `update` needs the parameters.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import eden, scaled_adam
        >>> params = {"kernel": jnp.array([3.0, -4.0]), "bias": jnp.zeros(2)}
        >>> optimizer = scaled_adam(eden(0.03, steps_per_epoch=1000), clipping_scale=2.0)
        >>> grads = {"kernel": jnp.ones(2), "bias": jnp.ones(2)}
        >>> updates, state = optimizer.update(grads, optimizer.init(params), params)
        >>> print(updates["kernel"], updates["bias"])  # of a size with the parameters
        [-0.0053033 -0.0053033] [-1.5e-08 -1.5e-08]

    References:
        Yao et al., *Zipformer: A faster and better encoder for automatic speech recognition*,
        arXiv 2310.11230, section 3.5; icefall,
        `egs/librispeech/ASR/zipformer/optim.py`: `ScaledAdam`.
    """
    groups = check_groups(groups, stacked, "weight_decay")
    arguments.check_numbers("[0, 1)", b1=b1)
    arguments.check_numbers("[0, inf)", scalar_lr_scale=scalar_lr_scale)
    sizes = {"param_min_rms": param_min_rms, "param_max_rms": param_max_rms}
    arguments.check_numbers("(0, inf)", **sizes)
    arguments.check_order(**sizes)
    arguments.check_dtypes(mu_dtype=mu_dtype)
    rate = groups.per_group("learning_rate", learning_rate)
    return chain(
        clip_by_median_norm(clipping_scale, scalar_scale=scalar_lr_scale, stacked=stacked),
        sum_of(
            chain(
                scale_by_second_moment(b2, eps=eps, bias_correction="early"),
                scale_by_parameter_rms(
                    param_min_rms, period=4, scalar_scale=scalar_lr_scale, stacked=stacked
                ),
                scale_by_learning_rate(rate),
            ),
            learn_log_scale(
                rate,
                b2=b2,
                eps=eps,
                speed=scalar_lr_scale,
                period=4,
                max_change=0.1,
                rms_bounds=(param_min_rms, param_max_rms),
                stacked=stacked,
            ),
        ),
        accumulate_momentum(b1, averaging=True, accumulator_dtype=mu_dtype),
        clamp_parameters(10.0, scalars_only=True, stacked=stacked),
    )


@without_nu_dtype
@renamed(mask="weight_decay_mask")
def eve(
    learning_rate: Scalar | optax.Schedule = 1e-3,
    *,
    b1: Scalar | optax.Schedule = 0.9,
    b2: Scalar | optax.Schedule = 0.98,
    eps: Scalar = 1e-8,
    weight_decay: Scalar | optax.Schedule = 1e-3,
    weight_decay_mask: Mask = None,
    target_rms: Scalar = 0.1,
    groups: ParamGroups | None = None,
    stacked: Stacks = None,
    mu_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Eve: Adam, with weight decay only for blocks whose root mean square exceeds a target.

    .. math::

        m_t &= b_1 m_{t-1} + (1 - b_1) g_t, \qquad v_t = b_2 v_{t-1} + (1 - b_2) g_t^2 \\
        w_{t+1} &= w_t - \eta \, \frac{m_t / (1 - b_1^t)}{\sqrt{v_t / (1 - b_2^t)} + \epsilon}
            - \begin{cases} \lambda w_t & \operatorname{rms}(w_t) > \rho \\ 0 & \text{otherwise}
            \end{cases}

    The decay is not multiplied by the learning rate. A block is an array, or one layer of an array
    that stacks layers. Blocks of one element are not decayed.

    Args:
        learning_rate: length of a step in each element, as in Adam: 0.003 with `eden`, for which it
            was made. :math:`\eta`, 0 or more; a float or a schedule.
        b1: decay rate of the first moment: 0.9 in icefall. In [0, 1); a float or a schedule.
        b2: decay rate of the second moment, an average over about :math:`1 / (1 - b_2)` steps: 0.98
            in icefall. In [0, 1); a float or a schedule.
        eps: keeps the division finite where the gradient has been near 0: 1e-8 in icefall.
            :math:`\epsilon`, positive.
        weight_decay: the fraction of the weights that a step takes away; it is not multiplied by
            the learning rate: 1e-3 in icefall. :math:`\lambda`, in [0, 0.1]; a float or a schedule.
        weight_decay_mask: the parameters that may be decayed; None for all, which is usual, since
            only large ones are.
        target_rms: root mean square above which blocks are decayed: 0.1 in icefall. :math:`\rho`,
            in (0, 10].
        groups: groups of parameters with another learning rate or decay, from
            `param_groups`; None for one group.
        stacked: the parameters that stack layers (`flax.linen.scan`, `nnx.vmap`, experts), so that
            each layer has a norm of its own: patterns with their axes, `{"layers/": 0}`, or the
            result of `stacked_layers`. None if there are none.
        mu_dtype: dtype in which the first moment is kept: bfloat16 saves two bytes for each
            parameter. None for float32 (float64 for float64 parameters).

    Returns:
        The optimizer. Its `update` needs the parameters.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import eve
        >>> params = {"kernel": jnp.array([3.0, -4.0]), "bias": jnp.array([0.01, 0.01])}
        >>> optimizer = eve(1e-2, weight_decay=1e-3)
        >>> grads = {"kernel": jnp.array([1.0, 1.0]), "bias": jnp.array([1.0, 1.0])}
        >>> updates, state = optimizer.update(grads, optimizer.init(params), params)
        >>> print(updates["kernel"].round(4), updates["bias"].round(4))
        [-0.013 -0.006] [-0.01 -0.01]

    References:
        icefall, `optim.py` of July 2022: `Eve`.
    """
    groups = check_groups(groups, stacked)
    return chain(
        scale_by_adam(b1, b2, eps, mu_dtype=mu_dtype),
        scale_by_learning_rate(groups.per_group("learning_rate", learning_rate)),
        decay_to_target_rms(
            groups.per_group("weight_decay", weight_decay),
            target_rms=target_rms,
            weight_decay_mask=weight_decay_mask,
            stacked=stacked,
        ),
    )


@refused(scale_speed="It is 0.05: icefall ignores what is passed.")
@without_nu_dtype
def cain(
    learning_rate: Scalar | optax.Schedule = 1e-2,
    *,
    b1: Scalar = 0.9,
    b2: Scalar = 0.98,
    eps: Scalar = 1e-8,
    rms_eps: Scalar = 1e-5,
    param_max: Scalar = 20.0,
    groups: ParamGroups | None = None,
    stacked: Stacks = None,
    mu_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Cain: steps in proportion to the size of each parameter, whose scale is learned too.

    .. math::

        v_t &= b_2 v_{t-1} + (1 - b_2) g_t^2, \qquad
        s_t = \textstyle\sum w_t g_t, \qquad q_t = b_2 q_{t-1} + (1 - b_2) s_t^2 \\
        D_t &= -\eta (1 - b_2^{t-1}) \, R_t \frac{g_t}{\sqrt{v_t} + \epsilon}
            - \eta \gamma \sqrt{1 - b_2^t} \, \frac{s_t}{\sqrt{q_t} + \epsilon} \, w_t \\
        w_{t+1} &= w_t + \Delta_t, \qquad \Delta_t = b_1 \Delta_{t-1} + (1 - b_1) D_t

    :math:`R_t` estimates the size of each parameter by a product of one factor for each axis (see
    `scale_by_factored_parameter_rms`). In the first step, and in every tenth, the parameters are
    clamped. A block is an array, or one layer of an array that stacks layers. Blocks of one element
    have no :math:`R`, no learned scale, and the factor :math:`\sqrt{1 - b_2^{t-1}}`. The factor
    :math:`1 - b_2^{t-1}` is as in the original. It lags one step behind, so the first step changes
    only the scale.

    The momentum is made of steps, not of gradients: a change of the learning rate takes effect
    over the next :math:`1 / (1 - b_1)` steps.

    Args:
        learning_rate: relative change of a parameter in a step: 0.03 with `eden`, for which it was
            made. :math:`\eta`, 0 or more; a float or a schedule.
        b1: decay rate of the momentum: 0.9 in icefall. In [0, 1).
        b2: decay rate of the second moments, an average over about :math:`1 / (1 - b_2)` steps:
            0.98 in icefall. In [0, 1).
        eps: keeps the division finite where the gradient has been near 0: 1e-8 in icefall.
            :math:`\epsilon`, 0 or more; with 0, :math:`0/0` counts as 0.
        rms_eps: least size that a step is measured against, so that parameters that start at zero
            move; raise it if they take too long. Positive.
        param_max: the largest magnitude of an element of a parameter: 20 in icefall. Positive.
        groups: groups of parameters with another learning rate, from `param_groups`; None for one
            group. There is no weight decay.
        stacked: the parameters that stack layers (`flax.linen.scan`, `nnx.vmap`, experts), so that
            each layer has a norm of its own: patterns with their axes, `{"layers/": 0}`, or the
            result of `stacked_layers`. None if there are none.
        mu_dtype: dtype in which the first moment is kept: bfloat16 saves two bytes for each
            parameter. None for float32 (float64 for float64 parameters).

    Returns:
        The optimizer. Its `update` needs the parameters, and inside `jax.shard_map`, where they are
        split, `partition_specs`.

    Raises:
        ValueError: inside `jax.shard_map`, a parameter is
            split and `partition_specs` are not given.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import cain
        >>> params = jnp.array([[10.0, 10.0, 10.0], [100.0, 100.0, 100.0]])
        >>> optimizer = cain(1e-2)
        >>> state = optimizer.init(params)
        >>> grads = jnp.ones((2, 3))
        >>> for _ in range(20):
        ...     updates, state = optimizer.update(grads, state, params)
        >>> print([f"{x:.2f}" for x in updates[:, 0]])  # a larger step for larger parameters
        ['-0.04', '-0.43']

    References:
        icefall, `optim.py` of July 2022: `Cain`, which ignores its argument `scale_speed`.
    """
    groups = check_groups(groups, stacked, "weight_decay")
    arguments.check_numbers("[0, 1)", b1=b1)
    arguments.check_numbers("(0, inf)", rms_eps=rms_eps, param_max=param_max)
    arguments.check_dtypes(mu_dtype=mu_dtype)
    rate = groups.per_group("learning_rate", learning_rate)
    return chain(
        sum_of(
            chain(
                scale_by_second_moment(b2, eps=eps, bias_correction="lagged", stacked=stacked),
                scale_by_factored_parameter_rms(rms_eps, stacked=stacked),
                scale_by_learning_rate(rate),
            ),
            learn_log_scale(rate, b2=b2, eps=eps, speed=0.05, stacked=stacked),
        ),
        accumulate_momentum(b1, averaging=True, accumulator_dtype=mu_dtype),
        clamp_parameters(param_max, period=10),
    )


_AS_ICEFALL = "This experiment has icefall's value."


@refused(
    **dict.fromkeys(("size_lr_scale", "meta_lr_scale", "max_step_scale"), _AS_ICEFALL),
    **dict.fromkeys(("param_min_rms", "param_max_rms", "size_update_period"), _AS_ICEFALL),
)
def learned_gradient(
    learning_rate: Scalar | optax.Schedule = 0.03,
    *,
    b1: Scalar = 0.9,
    b2: Scalar = 0.98,
    eps: Scalar = 1e-8,
    lr_est_period: int = 10,
    max_fullcov_size: int = 1024,
    groups: ParamGroups | None = None,
    stacked: Stacks = None,
    mu_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""LearnedGradient, experimental: momentum times learned matrices, one for each axis.

    .. math::

        m_t &= b_1 m_{t-1} + (1 - b_1) g_t, \qquad d_t = (\times)_k L_k m_t, \qquad
        \rho = \operatorname{rms}(d_t) \\
        w_{t+1} &= w_t - \eta \, \max(r, r_{\min}) \, \frac{1 - b_1}{\sqrt{1 - b_1^2}}
            \, \frac{\min(\max(d_t, -c \rho), c \rho)}{\rho} + \sigma_t w_t,
            \qquad r = \operatorname{rms}(w)

    The matrices :math:`L_k` are trained so that :math:`d` agrees with the next gradient. Every 4
    steps :math:`r` is measured again, and :math:`\sigma_t` is a step on the logarithm of the
    block's scale, at a tenth of the learning rate (see `learn_log_scale`). Where :math:`r` is not
    between :math:`r_{\min} = 10^{-5}` and 2, that step leads back at full speed. In all other steps
    :math:`\sigma_t = 0`. Here :math:`c` is 2.

    This is an experiment and no recommendation. The original class cannot run; this is a corrected
    version of it. On the toy task of its authors the learned matrices helped at a learning rate of
    0.1 and hurt at 0.03.

    Args:
        learning_rate: relative change of a parameter in a step: 0.03 changes each by some 3% of its
            root mean square. :math:`\eta`, 0 or more; a float or a schedule.
        b1: decay rate of the first moments: 0.9 in icefall. In [0, 1).
        b2: decay rate of the second moments, an average over about :math:`1 / (1 - b_2)` steps:
            0.98 in icefall. In [0, 1).
        eps: keeps the division finite in blocks with five elements or fewer: 1e-8 in icefall.
            :math:`\epsilon`, 0 or more; with 0, :math:`0/0` counts as 0.
        lr_est_period: how many steps are between two updates of the matrices, which cost the most:
            10 in icefall. 1 or more.
        max_fullcov_size: the longest axis with a full matrix, whose cost grows with its cube; a
            longer axis has a diagonal matrix. 0 or more.
        groups: groups of parameters with another learning rate, from `param_groups`; None for one
            group. There is no weight decay.
        stacked: the parameters that stack layers (`flax.linen.scan`, `nnx.vmap`, experts), so that
            each layer has a norm of its own: patterns with their axes, `{"layers/": 0}`, or the
            result of `stacked_layers`. None if there are none.
        mu_dtype: dtype in which the first moment is kept: bfloat16 saves two bytes for each
            parameter. None for float32 (float64 for float64 parameters).

    Returns:
        The optimizer. Its `update` needs the parameters, and inside `jax.shard_map`, where they are
        split, `partition_specs`.

    Raises:
        ValueError: inside `jax.shard_map`, a parameter is
            split and `partition_specs` are not given.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import learned_gradient
        >>> params = 2 * jnp.ones((2, 3))
        >>> optimizer = learned_gradient(0.1)
        >>> updates, state = optimizer.update(params, optimizer.init(params), params)
        >>> print(updates.round(4))
        [[-0.0459 -0.0459 -0.0459]
         [-0.0459 -0.0459 -0.0459]]

    References:
        icefall, `optim.py` of July 2022: `LearnedGradient`, which cannot run.
    """
    groups = check_groups(groups, stacked, "weight_decay")
    arguments.check_integer("lr_est_period", lr_est_period, at_least=1)
    rate = groups.per_group("learning_rate", learning_rate)
    return sum_of(
        chain(
            scale_by_learned_matrices(
                rate,
                b1=b1,
                b2=b2,
                eps=eps,
                period=lr_est_period,
                max_fullcov_size=max_fullcov_size,
                stacked=stacked,
                mu_dtype=mu_dtype,
            ),
            scale_by_parameter_rms(period=4, stacked=stacked),
            scale_by_learning_rate(rate),
        ),
        learn_log_scale(
            rate,
            b1=b1,
            b2=b2,
            eps=1e-10,
            period=4,
            rms_bounds=(1e-5, 2.0),
            at_bounds="return",
            stacked=stacked,
        ),
    )
