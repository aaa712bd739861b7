"""LearnedGradient of icefall, an experiment: momentum times learned matrices."""

from typing import Any

import optax

from optax_largebatch import arguments
from optax_largebatch.arguments import Scalar, refused
from optax_largebatch.params.groups import ParamGroups, check_groups
from optax_largebatch.params.stacked import Stacks
from optax_largebatch.transforms.chain import chain, sum_of
from optax_largebatch.transforms.learned_matrices import scale_by_learned_matrices
from optax_largebatch.transforms.learning_rate import scale_by_learning_rate
from optax_largebatch.transforms.parameter_scale.log_scale import learn_log_scale
from optax_largebatch.transforms.parameter_scale.parameter_rms import scale_by_parameter_rms


@refused(
    "size_lr_scale",
    "meta_lr_scale",
    "max_step_scale",
    "param_min_rms",
    "param_max_rms",
    "size_update_period",
    why="This experiment has icefall's value.",
)
def learned_gradient(
    learning_rate: optax.ScalarOrSchedule = 0.03,
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
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from optax_largebatch import learned_gradient
        >>> target = jnp.array([[0.0, 3.0], [4.0, 0.0]])
        >>> def loss_of(params):
        ...     kernel, bias = params["kernel"], params["bias"]
        ...     return jnp.sum((kernel - target) ** 2) + jnp.sum((bias - 1) ** 2)
        >>> params = {"kernel": jnp.array([[3.0, 0.0], [0.0, 4.0]]), "bias": jnp.zeros(2)}
        >>> optimizer = learned_gradient(0.1)
        >>> state = optimizer.init(params)
        >>> for step in range(21):
        ...     loss, grads = jax.value_and_grad(loss_of)(params)
        ...     updates, state = optimizer.update(grads, state, params)
        ...     params = optax.apply_updates(params, updates)
        ...     if step % 5 == 0:
        ...         print(f"loss {loss:.1f}")
        loss 52.0
        loss 41.7
        loss 27.1
        loss 15.9
        loss 8.4

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
