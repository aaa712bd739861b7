"""Cain of icefall: steps in proportion to the size of each parameter."""

from typing import Any

import optax

from optax_largebatch import arguments
from optax_largebatch.arguments import Scalar, refused, without_nu_dtype
from optax_largebatch.params.groups import ParamGroups, check_groups
from optax_largebatch.params.stacked import Stacks
from optax_largebatch.transforms.adam import scale_by_second_moment
from optax_largebatch.transforms.chain import chain, sum_of
from optax_largebatch.transforms.clamping import clamp_parameters
from optax_largebatch.transforms.learning_rate import scale_by_learning_rate
from optax_largebatch.transforms.momentum import accumulate_momentum
from optax_largebatch.transforms.parameter_scale.factored_parameter_rms import (
    scale_by_factored_parameter_rms,
)
from optax_largebatch.transforms.parameter_scale.log_scale import learn_log_scale


@refused("scale_speed", why="It is 0.05: icefall ignores what is passed.")
@without_nu_dtype
def cain(
    learning_rate: optax.ScalarOrSchedule = 1e-2,
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
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from optax_largebatch import cain
        >>> target = jnp.array([[0.0, 3.0], [4.0, 0.0]])
        >>> def loss_of(params):
        ...     kernel, bias = params["kernel"], params["bias"]
        ...     return jnp.sum((kernel - target) ** 2) + jnp.sum((bias - 1) ** 2)
        >>> params = {"kernel": jnp.array([[3.0, 0.0], [0.0, 4.0]]), "bias": jnp.zeros(2)}
        >>> optimizer = cain(0.3)
        >>> state = optimizer.init(params)
        >>> for step in range(21):
        ...     loss, grads = jax.value_and_grad(loss_of)(params)
        ...     updates, state = optimizer.update(grads, state, params)
        ...     params = optax.apply_updates(params, updates)
        ...     if step % 5 == 0:
        ...         print(f"loss {loss:.1f}")
        loss 52.0
        loss 48.1
        loss 35.4
        loss 20.6
        loss 9.7

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
