"""LANS: LAMB with normalised gradients and Nesterov's momentum."""

from typing import Any, Literal

import optax

from optax_largebatch.arguments import Bounds, Scalar, refused, renamed, without_nu_dtype
from optax_largebatch.params.groups import ParamGroups, check_groups
from optax_largebatch.params.masks import Mask
from optax_largebatch.params.stacked import Stacks
from optax_largebatch.transforms.block_normalization import normalize_by_block_norm
from optax_largebatch.transforms.chain import chain
from optax_largebatch.transforms.decay import add_decayed_weights
from optax_largebatch.transforms.learning_rate import scale_by_learning_rate
from optax_largebatch.transforms.nesterov import nesterov_split
from optax_largebatch.transforms.trust_ratio import scale_by_trust_ratio


@refused(
    "clip_gradient",
    "bias_correction",
    "grad_averaging",
    why="LANS is a chain: write lb.chain(lb.normalize_by_block_norm(...), lb.clip_by_value(...), "
    "lb.nesterov_split(...), lb.scale_by_learning_rate(...)) with the argument of the link, as "
    "docs/dialects.md does for Apex.",
)
@without_nu_dtype
@renamed("mask", "weight_decay_mask")
def lans(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: optax.ScalarOrSchedule = 0.9,
    b2: optax.ScalarOrSchedule = 0.999,
    eps: Scalar = 1e-6,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Mask = None,
    trust_ratio_mask: Mask = None,
    param_norm_bounds: Bounds = None,
    order: Literal["simultaneous", "sequential"] = "simultaneous",
    groups: ParamGroups | None = None,
    stacked: Stacks = None,
    mu_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""LANS: LAMB on normalised gradients, with each part of Nesterov's momentum adapted alone.

    .. math::

        \tilde g_t &= g_t / \lVert g_t \rVert \\
        m_t &= b_1 m_{t-1} + (1 - b_1) \tilde g_t, \qquad
        v_t = b_2 v_{t-1} + (1 - b_2) \tilde g_t^2, \qquad
        d_t = \sqrt{v_t / (1 - b_2^t)} + \epsilon \\
        u_t &= \frac{m_t / (1 - b_1^t)}{d_t} + \lambda w_t, \qquad
        c_t = \frac{\tilde g_t}{d_t} + \lambda w_t \\
        w_{t+1} &= w_t - \eta\, \phi(\lVert w_t \rVert) \left(
            b_1 \frac{u_t}{\lVert u_t \rVert} + (1 - b_1) \frac{c_t}{\lVert c_t \rVert} \right)

    Each norm is taken over one block: an array, or one layer of an array that stacks layers. A
    gradient of 0 stays 0, and a ratio is 1 where one of its norms is 0. The size of the gradient
    does not matter, so it needs no clipping by norm and no loss scale. This holds as long as
    float32 holds the squares: the gradient norm of a block has to lie between 1e-15 and 1e18 (see
    `normalize_by_block_norm`). As with LAMB, leave biases and scales that start at 0 out of the
    adaptation: `trust_ratio_mask=~matching_kinds("bias", "norm")`.

    Args:
        learning_rate: relative length of a step: 0.004 moves each layer by about 0.4% of its norm.
            Typical above a batch of 2k: 0.002 to 0.016; the paper has 0.005 at 33,792 and 0.00675
            at 98,304. :math:`\eta`, 0 or more; a float or a schedule (the paper's is
            `warmup_decay`).
        b1: decay rate of the first moment, and the share of its half of the step: 0.9 in the paper.
            0.8 took somewhat fewer steps in our small runs. In [0, 1); a float or a schedule.
        b2: decay rate of the second moment, an average over about :math:`1 / (1 - b_2)` steps:
            0.999 in the paper. Take less, such as 0.98, for a run of few thousand steps whose loss
            is unsteady. In [0, 1); a float or a schedule.
        eps: keeps the division finite where the gradient has been near 0: 1e-6 in the paper.
            :math:`\epsilon`, positive.
        weight_decay: how much of the parameters is added to both directions, before the ratios set
            their length: 0.01 in the paper, 0 for none. :math:`\lambda`, 0 or more; a float or a
            schedule.
        weight_decay_mask: the parameters that are decayed; None for all. Usually all but biases and
            the scales of norms: `~matching_kinds("bias", "norm")`.
        trust_ratio_mask: the parameters whose steps get their length from their norm; None for all.
            Usually the same as `weight_decay_mask`, since biases and scales start at 0 or 1, and
            their norm says little. The others have ratio 1.
        param_norm_bounds: bounds on the norm of a layer where it sets the length of a step,
            :math:`\phi(z) = \min(\max(z, low), high)`. `(low, high)`, None for an end without a
            bound; None, as in the paper, for none.
        order: `"simultaneous"` takes both halves of a step from the same weights; `"sequential"`
            computes :math:`c_t` from the weights after the first half.
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
        >>> from optax_largebatch import lans, matching_kinds
        >>> target = jnp.array([[0.0, 3.0], [4.0, 0.0]])
        >>> def loss_of(params):
        ...     kernel, bias = params["kernel"], params["bias"]
        ...     return jnp.sum((kernel - target) ** 2) + jnp.sum((bias - 1) ** 2)
        >>> params = {"kernel": jnp.array([[3.0, 0.0], [0.0, 4.0]]), "bias": jnp.zeros(2)}
        >>> kernels = ~matching_kinds("bias", "norm")
        >>> optimizer = lans(
        ...     0.1, weight_decay=0.01, weight_decay_mask=kernels, trust_ratio_mask=kernels)
        >>> state = optimizer.init(params)
        >>> for step in range(21):
        ...     loss, grads = jax.value_and_grad(loss_of)(params)
        ...     updates, state = optimizer.update(grads, state, params)
        ...     params = optax.apply_updates(params, updates)
        ...     if step % 5 == 0:
        ...         print(f"loss {loss:.1f}")
        loss 52.0
        loss 24.5
        loss 9.9
        loss 2.1
        loss 0.6

    References:
        Zheng et al., *Accelerated Large Batch Optimization of BERT Pretraining in 54 minutes*,
        arXiv 2006.13484, Algorithm 2.
    """
    groups = check_groups(groups, stacked)
    rate = groups.per_group("learning_rate", learning_rate)
    return chain(
        normalize_by_block_norm(stacked=stacked),
        nesterov_split(
            chain(
                add_decayed_weights(
                    groups.per_group("weight_decay", weight_decay),
                    weight_decay_mask,
                    stacked=stacked,
                ),
                scale_by_trust_ratio(
                    param_norm_bounds=param_norm_bounds,
                    trust_ratio_mask=trust_ratio_mask,
                    stacked=stacked,
                ),
            ),
            b1=b1,
            b2=b2,
            eps=eps,
            mu_dtype=mu_dtype,
            order=order,
            learning_rate=rate,
        ),
        scale_by_learning_rate(rate),
    )
