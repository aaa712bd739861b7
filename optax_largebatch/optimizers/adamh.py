"""AdamH: Adam's direction, in steps that keep the norms of the matrices."""

from typing import Any

import optax

from optax_largebatch import engine
from optax_largebatch.arguments import Scalar, refused
from optax_largebatch.params.blocks import blocks_of
from optax_largebatch.params.groups import (
    Grouped,
    Owners,
    ParamGroups,
    as_grouped,
    check_groups,
    scaled_rate,
    unless_others,
)
from optax_largebatch.params.masks import Mask, check_mask, select_leaves
from optax_largebatch.params.stacked import Stacked, Stacks, check_stacked
from optax_largebatch.plans.law import SHARE_OF_ADAM
from optax_largebatch.transforms.adam import scale_by_adam
from optax_largebatch.transforms.chain import chain
from optax_largebatch.transforms.hyperball import Radius, hyperball, hyperball_transform
from optax_largebatch.transforms.partitioned import Others, is_optimizer, partition

NO_DECAY = (
    "A decay shortens the parameters, and the projection makes them as long as before, so it would "
    "do nothing. For the decay of all other parameters give their optimizer: others=..."
)
"""Why there is no weight decay on a sphere."""


@refused("weight_decay", "weight_decay_mask", "mask", why=NO_DECAY)
def adamh(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: optax.ScalarOrSchedule = 0.9,
    b2: optax.ScalarOrSchedule = 0.95,
    eps: Scalar = 1e-8,
    mu_dtype: Any = None,
    radius: Radius = "now",
    others: Others = None,
    adamh_mask: Mask = None,
    groups: ParamGroups | None = None,
    stacked: Stacks = None,
) -> optax.GradientTransformationExtraArgs:
    r"""AdamH: Adam's direction, in steps on a sphere.

    .. math::

        m_t &= b_1 m_{t-1} + (1 - b_1) g_t, \qquad v_t = b_2 v_{t-1} + (1 - b_2) g_t^2, \qquad
        u_t = \frac{m_t / (1 - b_1^t)}{\sqrt{v_t / (1 - b_2^t)} + \epsilon} \\
        w' &= w_t - \eta \frac{\lVert w_t \rVert}{\lVert u_t \rVert} u_t, \qquad
        w_{t+1} = \frac{\lVert w_t \rVert}{\lVert w' \rVert} w'

    The norms of these parameters never change, so there is no weight decay to tune. Another
    optimizer, `others`, moves the rest.

    Args:
        learning_rate: the angle of a step: 0.01 turns each layer by 0.01 radians. From AdamW with
            the rate :math:`\eta_0` and the decay :math:`\lambda`, begin at :math:`\sqrt{\eta_0
            \lambda}`. :math:`\eta`, 0 or more; a float or a schedule.
        b1: decay rate of the first moment: 0.9 to 0.91 for the last layers of Marin's runs. In [0,
            1); a float or a schedule.
        b2: decay rate of the second moment: 0.95 in all recipes. In [0, 1); a float or a schedule.
        eps: keeps the division finite where the gradient has been near 0: almost 0 (4e-15 to 6e-15)
            in Marin's runs. :math:`\epsilon`, 0 or more.
        mu_dtype: dtype in which the first moment is kept: bfloat16 saves two bytes for each
            parameter. None for float32 (float64 for float64 parameters).
        radius: the norm that a layer keeps: `"now"` for that before the step, `"start"` for that at
            its first step, or a number for all layers; see `hyperball`.
        others: the optimizer of all other parameters, such as `optax.adamw(...)`; or a learning
            rate or schedule, for Adam with the same moments. None for that Adam at 3/13 of the
            learning rate.
        adamh_mask: the parameters that keep their norms; None for all but vectors: what has one
            axis (in a stack, of a layer), and what is called a bias or a scale, as the biases of
            attention with an axis of heads. Leave out embeddings,
            `adamh_mask=~matching("embed") & ~matching_kinds("bias", "norm", "vector")`, unless you
            want their norms fixed.
        groups: groups of parameters with another learning rate, from `param_groups`; None for one
            group. The rate applies to `others` too, if that is None.
        stacked: the parameters that stack layers (`flax.linen.scan`, `nnx.vmap`, experts), so that
            each layer has a norm of its own: patterns with their axes, `{"layers/": 0}`, or the
            result of `stacked_layers`. None if there are none.

    Returns:
        The optimizer. Its `update` needs the parameters.

    Raises:
        TypeError: an argument has the wrong type, or `weight_decay` is given.
        ValueError: an argument is out of its range.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from optax_largebatch import adamh, warmup_decay
        >>> target = jnp.array([[0.0, 3.0], [4.0, 0.0]])
        >>> def loss_of(params):
        ...     kernel, bias = params["kernel"], params["bias"]
        ...     return jnp.sum((kernel - target) ** 2) + jnp.sum((bias - 1) ** 2)
        >>> params = {"kernel": jnp.array([[3.0, 0.0], [0.0, 4.0]]), "bias": jnp.zeros(2)}
        >>> optimizer = adamh(warmup_decay(0.15, total_steps=21))
        >>> state = optimizer.init(params)
        >>> for step in range(21):
        ...     loss, grads = jax.value_and_grad(loss_of)(params)
        ...     updates, state = optimizer.update(grads, state, params)
        ...     params = optax.apply_updates(params, updates)
        ...     if step % 5 == 0:
        ...         print(f"loss {loss:.1f}")
        loss 52.0
        loss 23.3
        loss 7.1
        loss 2.2
        loss 1.3

    References:
        Wen et al., *Fantastic Pretraining Optimizers and Where to Find Them II: Hyperball
        Optimization*, arXiv 2606.16899.
        Levanter, `AdamHConfig`, whose learning rates differ by 13/3 in Marin's runs.
    """
    groups = check_groups(groups, stacked, "weight_decay")
    check_mask("adamh_mask", adamh_mask)
    rate = groups.per_group("learning_rate", learning_rate)
    stacks = check_stacked(stacked)

    def owners(params: optax.Params) -> list[str]:
        if adamh_mask is None:
            chosen = [not block.is_vector for block in blocks_of(params, stacks)]
        else:
            chosen = select_leaves("adamh_mask", adamh_mask, stacks.blocks(params))
        return ["adamh" if keeps_norm else "others" for keeps_norm in chosen]

    direction = scale_by_adam(b1, b2, eps, mu_dtype=mu_dtype)
    if not is_optimizer(others):
        return chain(direction, steps_beside_spheres(owners, rate, others, radius, stacks))
    # Without vectors, whose axes tell stacks, one would see stacks where there are none.
    on_spheres = chain(direction, hyperball(rate, radius=radius, stacked=stacks.unchecked))
    return partition("adamh", {"adamh": on_spheres, "others": others}, owners, stacks)


def steps_beside_spheres(
    owners: Owners,
    rate: Grouped,
    others: Others,
    radius: Radius,
    stacks: Stacked,
) -> optax.GradientTransformationExtraArgs:
    """`hyperball`, and steps at another rate for the parameters whose owner is called `others`.

    It is one link for all parameters, so that the layout of its state depends on no mask.
    """
    if others is None:
        of_others = rate.map(lambda of_group: scaled_rate(of_group, SHARE_OF_ADAM))
    else:
        of_others = as_grouped("others", others)
    return engine.transformation(
        hyperball_transform(
            unless_others(rate, of_others, owners),
            radius,
            lambda params: [owner != "others" for owner in owners(params)],
            stacks,
        )
    )
