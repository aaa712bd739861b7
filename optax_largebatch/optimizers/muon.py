"""Muon: orthogonalised momentum for matrices."""

from typing import Any, Literal

import optax

from optax_largebatch.arguments import Scalar, refused, renamed
from optax_largebatch.params.groups import ParamGroups, as_grouped, check_groups, unless_others
from optax_largebatch.params.likely_matrices import check_matrices
from optax_largebatch.params.masks import Mask, check_mask, select_leaves
from optax_largebatch.params.matrix_axes import MatrixAxes, check_axes
from optax_largebatch.params.stacked import Stacks
from optax_largebatch.transforms.adam import scale_by_adam
from optax_largebatch.transforms.chain import chain
from optax_largebatch.transforms.decay import add_decayed_weights
from optax_largebatch.transforms.learning_rate import scale_by_learning_rate
from optax_largebatch.transforms.orthogonalization.matrix_scale import (
    ShapeFactor,
    scale_by_matrix_shape,
)
from optax_largebatch.transforms.orthogonalization.newton_schulz import Preconditioning
from optax_largebatch.transforms.orthogonalization.orthogonalized_momentum import (
    orthogonalize_momentum,
)
from optax_largebatch.transforms.partitioned import OF_OTHERS, Others, is_optimizer, partition


@refused(
    "adam_b1",
    "adam_b2",
    "adam_eps_root",
    "adam_weight_decay",
    "adam_learning_rate",
    why=OF_OTHERS,
)
@renamed("mask", "weight_decay_mask")
@renamed("muon_weight_dimension_numbers", "matrix_axes")
def muon(
    learning_rate: optax.ScalarOrSchedule,
    ns_coeffs: Any = "standard",
    ns_steps: int | None = None,
    beta: optax.ScalarOrSchedule = 0.95,
    eps: Scalar = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Mask = None,
    mu_dtype: Any = None,
    *,
    nesterov: bool = True,
    bias_correction: Literal["full", "none"] = "full",
    grad_averaging: bool = True,
    adaptive: bool = False,
    preconditioning: Preconditioning = "frobenius",
    eps_is_floor: bool = False,
    consistent_rms: Scalar | None = None,
    shape_factor: ShapeFactor = "jordan",
    others: Others = None,
    matrix_mask: Mask = None,
    matrix_axes: MatrixAxes = None,
    ns_dtype: Any = None,
    ns_gram: bool = False,
    groups: ParamGroups | None = None,
    stacked: Stacks = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Muon: steps whose matrices have all their singular values near 1.

    .. math::

        m_t &= \beta m_{t-1} + (1 - \beta) g_t, \qquad
        d_t = \frac{\beta m_t}{1 - \beta^{t+1}} + \frac{(1 - \beta) g_t}{1 - \beta^t} \\
        u_t &= s \, \operatorname{NS}(d_t) + \lambda w_t, \qquad
        w_{t+1} = w_t - \eta u_t

    :math:`\operatorname{NS}` is the Newton-Schulz iteration of `orthogonalize_momentum`, and
    :math:`s` is the factor of `scale_by_matrix_shape`. Another optimizer, `others`, moves the
    parameters that are no matrices, and those that `matrix_mask` leaves out. Embeddings and the
    last layer usually belong to it too: `matrix_mask=~matching("embed", "head")`.

    With the arguments of `optax.contrib.muon`, it gives the numbers of `optax.contrib.muon`, with
    three exceptions. optax's `ns_coeffs="polar_express"` is `"polar_express_raw"` here, because
    rounding makes it unstable. With `adaptive`, optax takes a parameter that stacks matrices for
    one matrix. With `preconditioning="aol"` or `"schatten"`, optax takes divisors below 1e-8 for
    1e-8, so its steps are shorter where gradients are below about 1e-4.

    On a mesh, tell it how parameters are split, by `with_partition_specs` or `partition_specs` of
    `update`: then no matrix is gathered. If it is not told and two mesh axes split one axis of a
    parameter, the compiler gathers: as compiled for eight H100, that takes 10.5 times a device's
    own parameters as temporary memory, and 2.2 times if it is told.

    Args:
        learning_rate: size of a step. With `consistent_rms=0.2` a step is as long as Adam's, so
            begin with AdamW's rate (0.00042 for Moonlight 16B). Without it, and with
            `shape_factor`, the rate is about that of the singular values of a step: 0.025 for GPT-2
            124M. :math:`\eta`, 0 or more; a float or a schedule.
        ns_coeffs: the coefficients of the iteration: `"standard"`, Jordan's, is what most runs
            have; `"polar_express"` brings the singular values nearer to 1. See
            `orthogonalize_momentum`.
        ns_steps: how many iterations, 1 or more. More bring the singular values nearer to 1 and
            cost as many more products. None for 5, or for as many as the coefficients were
            published with; 5 in most recipes.
        beta: decay rate of the momentum: 0.95 in most recipes, 0.9 to 0.97 in all. :math:`\beta`,
            in [0, 1); a float or a schedule.
        eps: added to the norm that a matrix is divided by first, and :math:`\epsilon` of Adam: 1e-7
            to 1e-6 in most recipes. 0 or more.
        weight_decay: how much of the matrices is added to the direction; decoupled, as AdamW's.
            Tune it: 0.01 to 0.1 in the recipes; short runs want more, such as 0.3 for some hundred
            steps. :math:`\lambda`, 0 or more; a float or a schedule.
        weight_decay_mask: the matrices that are decayed; None for all, which is usual.
        mu_dtype: dtype in which the momentum is kept: bfloat16 saves two bytes for each parameter.
            None for float32 (float64 for float64 parameters).
        nesterov: whether a direction looks one step ahead, as in most recipes. False leaves the
            gradient out of :math:`d_t`, which is then :math:`m_t / (1 - \beta^t)`.
        bias_correction: `"full"` divides as above; `"none"`, as in all recipes, leaves the
            divisions out: see `orthogonalize_momentum`.
        grad_averaging: whether gradients are averaged. False sums them, as in PyTorch's momentum:
            see `orthogonalize_momentum`.
        adaptive: True makes a step shorter where its gradient is, see `orthogonalize_momentum`:
            False in all recipes.
        preconditioning: what a matrix is divided by before the iterations: `"frobenius"`, its norm,
            in all recipes. For the others see `orthogonalize_momentum`.
        eps_is_floor: True takes `eps` as the least norm that a matrix is divided by, as PyTorch and
            Megatron do, in place of adding it.
        consistent_rms: the root mean square of a step's elements. 0.2 is about that of Adam's
            steps, so Adam's learning rate and decay can be used, as in Moonlight. Positive; None
            for the factor of `shape_factor`.
        shape_factor: what a step is multiplied by, for its shape, without `consistent_rms`:
            `"jordan"` for :math:`s = \sqrt{\max(1, n_\text{columns} / n_\text{rows})}`,
            `"spectral_norm"`, as in Dion and Scion, for :math:`s = \sqrt{n_\text{columns} /
            n_\text{rows}}`, `"none"` for 1.
        others: the optimizer of all parameters that are no matrices, such as `optax.adamw(3e-4)` or
            `lamb(...)`; or a learning rate or schedule, for Adam with Nesterov's momentum. None for
            that Adam with the rate of the matrices, which suits `consistent_rms=0.2`.
        matrix_mask: the parameters that Muon moves, if they are matrices; None for all. Leave out
            the embeddings and the last layer: `~matching("embed", "head")`.
        matrix_axes: which axes are rows and columns, for parameters with more than two axes, such
            as convolutions, and for several matrices in one, such as queries, keys and values:
            see `orthogonalize_momentum`. (The argument `muon_weight_dimension_numbers` of
            `optax.contrib.muon`.)
        ns_dtype: dtype of the iterations: bfloat16, as in all recipes that name one, halves their
            time on a GPU, and what devices exchange. float16 is as fast and 6 to 10 times closer to
            float32, but devices exchange float32 then. None for float32 (float64 for float64
            parameters); NVIDIA's GPUs multiply float32 in tf32, with 10 bits.
        ns_gram: True takes two iterations at once where a side of a matrix is at least twice as
            long as the other, with a fifth fewer multiplications: see `orthogonalize_momentum`.
        groups: groups of matrices with another learning rate or decay, from `param_groups`; None
            for one group. The rate applies to Adam's parameters too, if `others` is None.
        stacked: the parameters that stack layers (`flax.linen.scan`, `nnx.vmap`, experts), so that
            each layer is a matrix of its own: patterns with their axes, `{"layers/": 0}`, or the
            result of `stacked_layers`. None if there are none.

    Returns:
        The optimizer. Its `update` needs the parameters.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from optax_largebatch import lamb, muon
        >>> target = jnp.array([[0.0, 3.0], [4.0, 0.0]])
        >>> def loss_of(params):
        ...     kernel, bias = params["kernel"], params["bias"]
        ...     return jnp.sum((kernel - target) ** 2) + jnp.sum((bias - 1) ** 2)
        >>> params = {"kernel": jnp.array([[3.0, 0.0], [0.0, 4.0]]), "bias": jnp.zeros(2)}
        >>> optimizer = muon(0.5, weight_decay=0.01, others=lamb(0.1))
        >>> state = optimizer.init(params)
        >>> for step in range(21):
        ...     loss, grads = jax.value_and_grad(loss_of)(params)
        ...     updates, state = optimizer.update(grads, state, params)
        ...     params = optax.apply_updates(params, updates)
        ...     if step % 5 == 0:
        ...         print(f"loss {loss:.1f}")
        loss 52.0
        loss 29.1
        loss 13.4
        loss 4.1
        loss 0.4

    References:
        Jordan et al., *Muon: An optimizer for hidden layers in neural networks*, 2024,
        https://kellerjordan.github.io/posts/muon.
        Liu et al., *Muon is Scalable for LLM Training*, arXiv 2502.16982, Algorithm 1.
    """
    groups = check_groups(groups, stacked)
    check_mask("matrix_mask", matrix_mask)
    rate = groups.per_group("learning_rate", learning_rate)
    matrices = chain(
        orthogonalize_momentum(
            beta,
            eps=eps,
            nesterov=nesterov,
            bias_correction=bias_correction,
            grad_averaging=grad_averaging,
            ns_coeffs=ns_coeffs,
            ns_steps=ns_steps,
            ns_dtype=ns_dtype,
            ns_gram=ns_gram,
            preconditioning=preconditioning,
            eps_is_floor=eps_is_floor,
            adaptive=adaptive,
            matrix_axes=matrix_axes,
            stacked=stacked,
            mu_dtype=mu_dtype,
        ),
        scale_by_matrix_shape(
            consistent_rms, shape_factor=shape_factor, matrix_axes=matrix_axes, stacked=stacked
        ),
        add_decayed_weights(
            groups.per_group("weight_decay", weight_decay), weight_decay_mask, stacked=stacked
        ),
    )
    axes = check_axes(matrix_axes, stacked)
    stacks = axes.stacked

    def owners(params: optax.Params) -> list[str]:
        select_leaves("weight_decay_mask", weight_decay_mask, stacks.blocks(params))  # its errors
        chosen = axes.are_matrices(params, matrix_mask)
        return ["muon" if is_matrix else "others" for is_matrix in chosen]

    def at_init(params: optax.Params) -> None:
        chosen = select_leaves("matrix_mask", matrix_mask, stacks.blocks(params))
        turns_matter = consistent_rms is None and shape_factor != "none"
        check_matrices("muon", axes, params, chosen, turns_matter)

    if is_optimizer(others):
        parts = {"muon": chain(matrices, scale_by_learning_rate(rate)), "others": others}
        return partition("muon", parts, owners, stacks, at_init)
    if others is not None:
        rate = unless_others(rate, as_grouped("others", others), owners)
    adam = scale_by_adam(eps=eps, nesterov=nesterov, mu_dtype=mu_dtype)
    directions = partition("muon", {"muon": matrices, "others": adam}, owners, stacks, at_init)
    return chain(directions, scale_by_learning_rate(rate))
