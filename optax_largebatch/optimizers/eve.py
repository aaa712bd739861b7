"""Eve of icefall: Adam that decays only what is large."""

from typing import Any

import optax

from optax_largebatch.arguments import Scalar, renamed, without_nu_dtype
from optax_largebatch.params.groups import ParamGroups, check_groups
from optax_largebatch.params.masks import Mask
from optax_largebatch.params.stacked import Stacks
from optax_largebatch.transforms.adam import scale_by_adam
from optax_largebatch.transforms.chain import chain
from optax_largebatch.transforms.decay import decay_to_target_rms
from optax_largebatch.transforms.learning_rate import scale_by_learning_rate


@without_nu_dtype
@renamed("mask", "weight_decay_mask")
def eve(
    learning_rate: optax.ScalarOrSchedule = 1e-3,
    *,
    b1: optax.ScalarOrSchedule = 0.9,
    b2: optax.ScalarOrSchedule = 0.98,
    eps: Scalar = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 1e-3,
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
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from optax_largebatch import eve
        >>> target = jnp.array([[0.0, 3.0], [4.0, 0.0]])
        >>> def loss_of(params):
        ...     kernel, bias = params["kernel"], params["bias"]
        ...     return jnp.sum((kernel - target) ** 2) + jnp.sum((bias - 1) ** 2)
        >>> params = {"kernel": jnp.array([[3.0, 0.0], [0.0, 4.0]]), "bias": jnp.zeros(2)}
        >>> optimizer = eve(0.2, weight_decay=1e-3)
        >>> state = optimizer.init(params)
        >>> for step in range(21):
        ...     loss, grads = jax.value_and_grad(loss_of)(params)
        ...     updates, state = optimizer.update(grads, state, params)
        ...     params = optax.apply_updates(params, updates)
        ...     if step % 5 == 0:
        ...         print(f"loss {loss:.1f}")
        loss 52.0
        loss 26.0
        loss 10.8
        loss 2.9
        loss 0.5

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
