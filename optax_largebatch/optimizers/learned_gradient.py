"""LearnedGradient, experimental: momentum times learned matrices."""

from typing import Any

import optax

from optax_largebatch.arguments import Scalar, check_integer, check_number, check_order
from optax_largebatch.params.groups import ParamGroups, check_groups
from optax_largebatch.params.stacked import Stacks
from optax_largebatch.transforms.branches import sum_of
from optax_largebatch.transforms.centralization import centralize_gradients
from optax_largebatch.transforms.chain import chain
from optax_largebatch.transforms.learning_rate import scale_by_learning_rate
from optax_largebatch.transforms.parameter_scale.log_scale import learn_log_scale
from optax_largebatch.transforms.parameter_scale.parameter_rms import scale_by_parameter_rms
from optax_largebatch.transforms.preconditioning.learned_matrices import scale_by_learned_matrices


def learned_gradient(
    learning_rate: Scalar | optax.Schedule = 0.03,
    *,
    b1: Scalar = 0.9,
    b2: Scalar = 0.98,
    eps: Scalar = 1e-8,
    size_lr_scale: Scalar = 0.1,
    meta_lr_scale: Scalar = 1.0,
    param_min_rms: Scalar = 1e-5,
    param_max_rms: Scalar = 2.0,
    lr_est_period: int = 10,
    max_step_scale: Scalar = 2.0,
    size_update_period: int = 4,
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

    The matrices :math:`L_k` are trained so that :math:`d` agrees with the next gradient (see
    `scale_by_learned_matrices`). Every :math:`T` steps :math:`r` is measured again, and
    :math:`\sigma_t` is a step on the logarithm of the block's scale (see `learn_log_scale`). Where
    :math:`r` is out of its bounds, that step leads back at full speed. In all other steps
    :math:`\sigma_t = 0`.

    This is an experiment and no recommendation. The original class cannot run; this is a corrected
    version of it. On the toy task of its authors the learned matrices helped at a learning rate of
    0.1 and hurt at 0.03; `meta_lr_scale=0` turns them off.

    Args:
        learning_rate: relative change of a parameter in a step: 0.03 changes each by some 3% of its
            root mean square. :math:`\eta`, 0 or more; a float or a schedule.
        b1: decay rate of the first moments: 0.9 in icefall. In [0, 1).
        b2: decay rate of the second moments, an average over about :math:`1 / (1 - b_2)` steps:
            0.98 in icefall. In [0, 1).
        eps: keeps the division finite in blocks with five elements or fewer: 1e-8 in icefall.
            :math:`\epsilon`, 0 or more; with 0, :math:`0/0` counts as 0.
        size_lr_scale: factor of the learning rate for the learned sizes: 0.1 in icefall. 0 or more.
        meta_lr_scale: factor of the learning rate for the matrices; 0 turns the learning of them
            off. 0 or more.
        param_min_rms: least size that a step is measured against, so that parameters that start at
            zero move; raise it if they take too long. :math:`r_{\min}`, positive.
        param_max_rms: size, as root mean square, from which a block shrinks: 2 in icefall.
            Positive.
        lr_est_period: how many steps are between two updates of the matrices, which cost the most:
            10 in icefall. 1 or more.
        max_step_scale: bound on the elements of a direction, relative to their root mean square: 2
            in icefall. :math:`c`, positive.
        size_update_period: how many steps are between two updates of the sizes: 4 in icefall.
            :math:`T`, 1 or more.
        max_fullcov_size: the longest axis with a full matrix, whose cost grows with its cube; a
            longer axis has a diagonal matrix. 0 or more.
        groups: groups of parameters with another learning rate or gradient centralisation, from
            `param_groups`; None for one group. There is no weight decay.
        stacked: the parameters that stack layers (`flax.linen.scan`, `nnx.vmap`, experts), so that
            each layer has a norm of its own: patterns with their axes, `{"layers/": 0}`, or the
            result of `stacked_layers`. None if there are none.
        mu_dtype: dtype in which the first moment is kept: bfloat16 saves two bytes for each
            parameter. None for float32 (float64 for float64 parameters).

    Returns:
        The optimizer. Its `update` needs the parameters, and inside `jax.shard_map`, where they are
        split, `partition_specs`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range; or, inside `jax.shard_map`, a parameter is
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
    check_number("size_lr_scale", size_lr_scale, "[0, inf)")
    check_number("param_min_rms", param_min_rms, "(0, inf)")
    check_number("param_max_rms", param_max_rms, "(0, inf)")
    check_order("param_min_rms", param_min_rms, "param_max_rms", param_max_rms)
    check_integer("lr_est_period", lr_est_period, at_least=1)
    check_integer("size_update_period", size_update_period, at_least=1)
    rate = groups.per_group("learning_rate", learning_rate)
    return chain(
        centralize_gradients(groups.per_group("grad_centralization", False), stacked=stacked),
        sum_of(
            chain(
                scale_by_learned_matrices(
                    rate,
                    b1=b1,
                    b2=b2,
                    eps=eps,
                    meta_lr_scale=meta_lr_scale,
                    period=lr_est_period,
                    max_step_scale=max_step_scale,
                    max_fullcov_size=max_fullcov_size,
                    stacked=stacked,
                    mu_dtype=mu_dtype,
                ),
                scale_by_parameter_rms(param_min_rms, period=size_update_period, stacked=stacked),
                scale_by_learning_rate(rate),
            ),
            learn_log_scale(
                rate,
                b1=b1,
                b2=b2,
                eps=1e-10,
                speed=size_lr_scale,
                period=size_update_period,
                rms_bounds=(param_min_rms, param_max_rms),
                at_bounds="return",
                stacked=stacked,
            ),
        ),
    )
