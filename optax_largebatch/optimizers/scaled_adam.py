"""ScaledAdam of icefall: Adam with steps relative to the size of each tensor."""

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
from optax_largebatch.transforms.median_clipping import clip_by_median_norm
from optax_largebatch.transforms.momentum import accumulate_momentum
from optax_largebatch.transforms.parameter_scale.log_scale import learn_log_scale
from optax_largebatch.transforms.parameter_scale.parameter_rms import scale_by_parameter_rms


@refused(
    "scalar_max",
    "size_update_period",
    "clipping_update_period",
    why="It has icefall's value. Chain clip_by_median_norm for another median.",
)
@without_nu_dtype
def scaled_adam(
    learning_rate: optax.ScalarOrSchedule = 0.03,
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
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from optax_largebatch import eden2, scaled_adam
        >>> target = jnp.array([[0.0, 3.0], [4.0, 0.0]])
        >>> def loss_of(params):
        ...     kernel, bias = params["kernel"], params["bias"]
        ...     return jnp.sum((kernel - target) ** 2) + jnp.sum((bias - 1) ** 2)
        >>> params = {"kernel": jnp.array([[3.0, 0.0], [0.0, 4.0]]), "bias": jnp.zeros(2)}
        >>> optimizer = scaled_adam(eden2(0.2, lr_batches=100), clipping_scale=2.0)
        >>> state = optimizer.init(params)
        >>> for step in range(21):
        ...     loss, grads = jax.value_and_grad(loss_of)(params)
        ...     updates, state = optimizer.update(grads, state, params)
        ...     params = optax.apply_updates(params, updates)
        ...     if step % 5 == 0:
        ...         print(f"loss {loss:.1f}")
        loss 52.0
        loss 43.0
        loss 27.8
        loss 15.2
        loss 7.6

    References:
        Yao et al., *Zipformer: A faster and better encoder for automatic speech recognition*,
        arXiv 2310.11230, section 3.5; icefall,
        `egs/librispeech/ASR/zipformer/optim.py`: `ScaledAdam`.
    """
    groups = check_groups(groups, stacked, "weight_decay")
    arguments.check_numbers("[0, 1)", b1=b1)
    arguments.check_numbers("[0, inf)", scalar_lr_scale=scalar_lr_scale)
    arguments.check_numbers("(0, inf)", param_min_rms=param_min_rms, param_max_rms=param_max_rms)
    rms_bounds = (param_min_rms, param_max_rms)
    arguments.check_bounds("param_min_rms and param_max_rms", rms_bounds)
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
                rms_bounds=rms_bounds,
                stacked=stacked,
            ),
        ),
        accumulate_momentum(b1, averaging=True, accumulator_dtype=mu_dtype),
        clamp_parameters(10.0, scalars_only=True, stacked=stacked),
    )
