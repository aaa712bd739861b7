"""LAMB: layer-wise adaptive moments for batch training."""

from typing import Any

import optax

from optax_largebatch import arguments
from optax_largebatch.arguments import Bounds, Scalar, renamed, without_nu_dtype
from optax_largebatch.params.groups import ParamGroups, check_groups
from optax_largebatch.params.masks import Mask
from optax_largebatch.params.stacked import Stacks
from optax_largebatch.transforms.adam import BiasCorrection, bias_corrected_step_size, scale_by_adam
from optax_largebatch.transforms.chain import chain
from optax_largebatch.transforms.clipping import clip_by_global_norm
from optax_largebatch.transforms.decay import add_decayed_weights
from optax_largebatch.transforms.learning_rate import scale_by_learning_rate
from optax_largebatch.transforms.trust_ratio import scale_by_trust_ratio


@without_nu_dtype
@renamed("mask", "weight_decay_mask")
def lamb(
    learning_rate: optax.ScalarOrSchedule,
    b1: optax.ScalarOrSchedule = 0.9,
    b2: optax.ScalarOrSchedule = 0.999,
    eps: Scalar = 1e-6,
    eps_root: Scalar = 0.0,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Mask = None,
    *,
    trust_ratio_mask: Mask = None,
    param_norm_bounds: Bounds = None,
    trust_ratio_bounds: Bounds = None,
    trust_ratio_eps: Scalar = 0.0,
    bias_correction: BiasCorrection = "full",
    grad_averaging: bool = True,
    max_grad_norm: Scalar | None = None,
    groups: ParamGroups | None = None,
    stacked: Stacks = None,
    mu_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""LAMB: Adam whose step for each layer has a length proportional to the layer's weights.

    .. math::

        m_t &= b_1 m_{t-1} + (1 - b_1) g_t, \qquad v_t = b_2 v_{t-1} + (1 - b_2) g_t^2 \\
        u_t &= \frac{m_t / (1 - b_1^t)}{\sqrt{v_t / (1 - b_2^t) + \bar\epsilon} + \epsilon}
            + \lambda w_t \\
        w_{t+1} &= w_t - \eta \, \frac{\phi(\lVert w_t \rVert)}{\lVert u_t \rVert} \, u_t

    Each norm is taken over one block: an array, or one layer of an array that stacks layers. The
    ratio is 1 where one of the norms is 0. A bias or scale that starts at 0 grows slowly under
    adaptation: leave such parameters out with `trust_ratio_mask=~matching_kinds("bias", "norm")`,
    and usually out of the weight decay too.

    With the arguments of `optax.lamb`, it gives the numbers of `optax.lamb`. Parameters may be
    complex: squares are those of sizes, and the second moment is real. As for all of optax, pass
    the conjugate of what `jax.grad` returns for them.

    Args:
        learning_rate: relative length of a step: 0.004 moves each layer by 0.4% of its norm.
            Typical above a batch of 2k: 0.002 to 0.016; for contrastive pretraining and fine-tuning
            0.0001 to 0.0004. Rates of Adam are no guide. :math:`\eta`, 0 or more; a float or a
            schedule.
        b1: decay rate of the first moment, an average over about :math:`1 / (1 - b_1)` steps: 0.9
            in most recipes, 0.62 to 0.88 in those of MLPerf's BERT at a batch of 1536 or more. In
            [0, 1); a float or a schedule.
        b2: decay rate of the second moment, an average over about :math:`1 / (1 - b_2)` steps:
            0.999 in most recipes. Take less, such as 0.98, for a run of few thousand steps whose
            loss is unsteady. In [0, 1); a float or a schedule.
        eps: keeps the division finite where the gradient has been near 0; elements whose gradients
            are far below it move less. 1e-6 in most recipes. :math:`\epsilon`, 0 or more.
        eps_root: the same inside the root: 0 in all recipes. :math:`\bar\epsilon`, 0 or more.
        weight_decay: how much of the parameters is added to the direction, before the ratio sets
            its length. Typical: 0.01 for language, 0.01 to 0.05 for vision; 0 for none.
            :math:`\lambda`, 0 or more; a float or a schedule.
        weight_decay_mask: the parameters that are decayed; None for all. Usually all but biases and
            the scales of norms: `~matching_kinds("bias", "norm")`. (The argument `mask` of
            `optax.lamb`.)
        trust_ratio_mask: the parameters whose steps get their length from their norm; None for all.
            Usually the same as `weight_decay_mask`, since biases and scales start at 0 or 1, and
            their norm says little. The others have ratio 1.
        param_norm_bounds: bounds on the norm of a layer where it sets the length of a step,
            :math:`\phi(z) = \min(\max(z, low), high)`: `(low, None)` lets layers that start near 0
            move faster, and `(None, 10.0)` is what NVIDIA's Transformer-XL has. None for an end
            without a bound.
        trust_ratio_bounds: bounds on the whole ratio, in the form of `param_norm_bounds`: `(None,
            1.0)` makes no step longer than Adam's, and is called LAMBC. None for no bounds, as in
            the recipes.
        trust_ratio_eps: added to :math:`\lVert u_t \rVert`, so that layers with tiny updates move
            less: 0 in most recipes, 1e-6 in NVIDIA's Transformer-XL. 0 or more.
        bias_correction: what makes up for moments that start at 0: `"full"` divides as above;
            `"none"` leaves out the divisions by :math:`1 - b^t`, as some published code does;
            `"step_size"` leaves them out and takes :math:`\eta \sqrt{1 - b_2^t} / (1 - b_1^t)` in
            place of :math:`\eta`.
        grad_averaging: whether :math:`g_t` has the weight :math:`1 - b_1` in :math:`m_t`. False
            gives it the weight 1; it is for runs that began so (`grad_averaging` of Apex).
        max_grad_norm: bound on the norm of the whole gradient, applied first, against single bad
            batches: 1.0 in most recipes, 0.1 to 10 in all. Positive; None for no bound.
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
        >>> from optax_largebatch import lamb, matching_kinds
        >>> target = jnp.array([[0.0, 3.0], [4.0, 0.0]])
        >>> def loss_of(params):
        ...     kernel, bias = params["kernel"], params["bias"]
        ...     return jnp.sum((kernel - target) ** 2) + jnp.sum((bias - 1) ** 2)
        >>> params = {"kernel": jnp.array([[3.0, 0.0], [0.0, 4.0]]), "bias": jnp.zeros(2)}
        >>> kernels = ~matching_kinds("bias", "norm")
        >>> optimizer = lamb(
        ...     0.07, weight_decay=0.01, weight_decay_mask=kernels, trust_ratio_mask=kernels)
        >>> state = optimizer.init(params)
        >>> for step in range(21):
        ...     loss, grads = jax.value_and_grad(loss_of)(params)
        ...     updates, state = optimizer.update(grads, state, params)
        ...     params = optax.apply_updates(params, updates)
        ...     if step % 5 == 0:
        ...         print(f"loss {loss:.1f}")
        loss 52.0
        loss 31.0
        loss 17.8
        loss 9.0
        loss 3.2

    References:
        You et al., *Large Batch Optimization for Deep Learning: Training BERT in 76 minutes*,
        arXiv 1904.00962 (v5), Algorithm 2.
    """
    groups = check_groups(groups, stacked)
    arguments.check_numbers("[0, inf)", trust_ratio_eps=trust_ratio_eps)
    arguments.check_optional_number("max_grad_norm", max_grad_norm)
    arguments.check_choice("bias_correction", bias_correction, ("full", "none", "step_size"))
    rate = groups.per_group("learning_rate", learning_rate)
    if bias_correction == "step_size":
        rate = bias_corrected_step_size(rate, b1, b2)
        bias_correction = "none"
    return chain(
        clip_by_global_norm(max_grad_norm),
        scale_by_adam(
            b1,
            b2,
            eps,
            eps_root,
            bias_correction=bias_correction,
            grad_averaging=grad_averaging,
            mu_dtype=mu_dtype,
        ),
        add_decayed_weights(
            groups.per_group("weight_decay", weight_decay), weight_decay_mask, stacked=stacked
        ),
        scale_by_trust_ratio(
            eps=trust_ratio_eps,
            param_norm_bounds=param_norm_bounds,
            trust_ratio_bounds=trust_ratio_bounds,
            trust_ratio_mask=trust_ratio_mask,
            stacked=stacked,
        ),
        scale_by_learning_rate(rate),
    )
