"""MuonH: Muon whose matrices keep their norms."""

from typing import Any, Literal

import jax
import optax

from optax_largebatch.arguments import Scalar, check_numbers, refused, renamed
from optax_largebatch.optimizers.adamh import NO_DECAY, steps_beside_spheres
from optax_largebatch.params.blocks import blocks_of
from optax_largebatch.params.groups import ParamGroups, check_groups
from optax_largebatch.params.likely_matrices import check_matrices
from optax_largebatch.params.masks import Mask, check_mask, select_leaves
from optax_largebatch.params.matrix_axes import MatrixAxes, check_axes
from optax_largebatch.params.stacked import Stacks
from optax_largebatch.transforms.adam import scale_by_adam
from optax_largebatch.transforms.chain import chain
from optax_largebatch.transforms.hyperball import Radius, hyperball
from optax_largebatch.transforms.orthogonalization.orthogonalized_momentum import (
    orthogonalize_momentum,
)
from optax_largebatch.transforms.partitioned import OF_OTHERS, Others, is_optimizer, partition


@refused(
    "preconditioning",
    why="It is an argument of orthogonalize_momentum. For matrices alone, this optimizer is "
    "chain(orthogonalize_momentum(...), hyperball(learning_rate)).",
)
@refused(
    "adaptive",
    "consistent_rms",
    why="A step has the length learning_rate times the norm of the matrix, so a factor of its "
    "direction would do nothing. Leave it out.",
)
@refused("weight_decay", "weight_decay_mask", why=NO_DECAY)
@refused("adam_eps_root", "adam_weight_decay", "adam_learning_rate", why=OF_OTHERS)
@renamed("adam_b1", "b1")
@renamed("adam_b2", "b2")
@renamed("muon_weight_dimension_numbers", "matrix_axes")
def muonh(
    learning_rate: optax.ScalarOrSchedule,
    *,
    ns_coeffs: Any = "polar_express",
    ns_steps: int | None = None,
    beta: optax.ScalarOrSchedule = 0.95,
    eps: Scalar = 1e-8,
    mu_dtype: Any = None,
    nesterov: bool = True,
    bias_correction: Literal["full", "none"] = "full",
    grad_averaging: bool = True,
    radius: Radius = "now",
    b1: optax.ScalarOrSchedule = 0.9,
    b2: optax.ScalarOrSchedule = 0.95,
    adam_eps: Scalar = 1e-8,
    others: Others = None,
    adamh_mask: Mask = None,
    matrix_mask: Mask = None,
    matrix_axes: MatrixAxes = None,
    ns_dtype: Any = None,
    ns_gram: bool = False,
    groups: ParamGroups | None = None,
    stacked: Stacks = None,
) -> optax.GradientTransformationExtraArgs:
    r"""MuonH: Muon's direction, in steps on a sphere.

    .. math::

        m_t &= \beta m_{t-1} + (1 - \beta) g_t, \qquad
        d_t = \frac{\beta m_t}{1 - \beta^{t+1}} + \frac{(1 - \beta) g_t}{1 - \beta^t}, \qquad
        u_t = \operatorname{NS}(d_t) \\
        w' &= w_t - \eta \frac{\lVert w_t \rVert}{\lVert u_t \rVert} u_t, \qquad
        w_{t+1} = \frac{\lVert w_t \rVert}{\lVert w' \rVert} w'

    :math:`\operatorname{NS}` is the Newton-Schulz iteration of `orthogonalize_momentum`, and the
    second line is `hyperball`. The norms of the matrices never change, so there is no weight decay
    to tune. Parameters that `adamh_mask` names, such as the last layer, take Adam's direction on a
    sphere. Another optimizer, `others`, moves the rest: vectors, and what `matrix_mask` leaves out.

    On a mesh, tell it how parameters are split, by `with_partition_specs` or `partition_specs` of
    `update`, as `muon`: otherwise the compiler may gather matrices.

    Args:
        learning_rate: the angle of a step: 0.01 turns each matrix by 0.01 radians. Published peaks:
            0.018 for GPT-2 124M, 0.0033 to 0.0051 for models of 67B and 535B. From Muon or AdamW
            with the rate :math:`\eta_0` and the decay :math:`\lambda`, begin at :math:`\sqrt{\eta_0
            \lambda}`. :math:`\eta`, 0 or more; a float or a schedule.
        ns_coeffs: the coefficients of the iteration: `"polar_express"` brings the singular values
            near to 1; Marin's runs have `"dion"`. See `orthogonalize_momentum`.
        ns_steps: how many iterations, 1 or more. More bring the singular values nearer to 1 and
            cost as many more products. None for 5, or for as many as the coefficients were
            published with; 5 in most recipes.
        beta: decay rate of the momentum: 0.95 in all recipes. :math:`\beta`, in [0, 1); a float or
            a schedule.
        eps: added to the norm that a matrix is divided by before the iterations: 1e-8 to 1e-7 in
            the recipes. 0 or more.
        mu_dtype: dtype in which the momentum and Adam's first moment are kept: bfloat16 saves two
            bytes for each parameter. None for float32 (float64 for float64 parameters).
        nesterov: whether a direction looks one step ahead, as in most recipes. False leaves the
            gradient out of :math:`d_t`, which is then :math:`m_t / (1 - \beta^t)`.
        bias_correction: `"full"` divides as above; `"none"`, as in all recipes, leaves the
            divisions out: see `orthogonalize_momentum`.
        grad_averaging: whether gradients are averaged. False sums them, as in PyTorch's momentum:
            see `orthogonalize_momentum`.
        radius: the norm that a matrix keeps: `"now"` for that before the step, `"start"` for that
            at its first step, or a number for all; see `hyperball`.
        b1: decay rate of Adam's first moment: 0.8 to 0.91 in the recipes. In [0, 1); a float or a
            schedule.
        b2: decay rate of Adam's second moment: 0.95 in all recipes. In [0, 1); a float or a
            schedule.
        adam_eps: keeps Adam's division finite where the gradient has been near 0: 1e-10 or less in
            the recipes. :math:`\epsilon`, 0 or more.
        others: the optimizer of all other parameters, such as `optax.adamw(...)`; or a learning
            rate or schedule, for Adam. None for Adam at 3/13 of the learning rate, as in Marin's
            runs. `groups` gives the head a rate of its own.
        adamh_mask: the parameters that keep their norms and take Adam's direction, usually the last
            layer: `matching("head")`; None for none. Vectors among them go to `others`.
        matrix_mask: the other parameters that this moves, if they are matrices; None for all. Leave
            out the embeddings: `~matching("embed")`.
        matrix_axes: which axes are rows and columns, for parameters with more than two axes, such
            as convolutions, and for several matrices in one, such as queries, keys and values:
            see `orthogonalize_momentum`. Each matrix of a text keeps its own norm; with a pair of
            axes, all that a block of `stacked` has keeps one.
        ns_dtype: dtype of the iterations: bfloat16, as in all recipes that name one, halves their
            time on a GPU, and what devices exchange. float16 is as fast and 6 to 10 times closer to
            float32, but devices exchange float32 then. None for float32 (float64 for float64
            parameters); NVIDIA's GPUs multiply float32 in tf32, with 10 bits.
        ns_gram: True takes two iterations at once where a side of a matrix is at least twice as
            long as the other, with a fifth fewer multiplications: see `orthogonalize_momentum`.
        groups: groups of parameters with another learning rate, from `param_groups`; None for one
            group. The rate applies to `others` too, if that is None.
        stacked: the parameters that stack layers (`flax.linen.scan`, `nnx.vmap`, experts), so that
            each layer is a matrix of its own: patterns with their axes, `{"layers/": 0}`, or the
            result of `stacked_layers`. None if there are none.

    Returns:
        The optimizer. Its `update` needs the parameters.

    Raises:
        TypeError: an argument has the wrong type, or `weight_decay` is given.
        ValueError: an argument is out of its range; or, from `init`, `stacked` is None and some
            parameters look like stacks of layers.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from optax_largebatch import muonh, warmup_decay
        >>> target = jnp.array([[0.0, 3.0], [4.0, 0.0]])
        >>> def loss_of(params):
        ...     kernel, bias = params["kernel"], params["bias"]
        ...     return jnp.sum((kernel - target) ** 2) + jnp.sum((bias - 1) ** 2)
        >>> params = {"kernel": jnp.array([[3.0, 0.0], [0.0, 4.0]]), "bias": jnp.zeros(2)}
        >>> optimizer = muonh(warmup_decay(0.25, total_steps=21))
        >>> state = optimizer.init(params)
        >>> for step in range(21):
        ...     loss, grads = jax.value_and_grad(loss_of)(params)
        ...     updates, state = optimizer.update(grads, state, params)
        ...     params = optax.apply_updates(params, updates)
        ...     if step % 5 == 0:
        ...         print(f"loss {loss:.1f}")
        loss 52.0
        loss 23.2
        loss 7.7
        loss 1.1
        loss 0.4

    References:
        Wen et al., *Fantastic Pretraining Optimizers and Where to Find Them II: Hyperball
        Optimization*, arXiv 2606.16899.
        Levanter, `MuonHConfig`; Marin's 67B and 535B runs train with it.
    """
    groups = check_groups(groups, stacked, "weight_decay")
    check_numbers("[0, inf)", adam_eps=adam_eps)
    check_mask("adamh_mask", adamh_mask)
    check_mask("matrix_mask", matrix_mask)
    rate = groups.per_group("learning_rate", learning_rate)
    axes = check_axes(matrix_axes, stacked, if_forgotten="error")
    stacks = axes.stacked

    def heads(params: optax.Params) -> list[bool]:
        """The parameters of `adamh_mask` but its vectors, whose norms say little about a step."""
        if adamh_mask is None:
            return [False] * len(jax.tree.leaves(params))
        chosen = select_leaves("adamh_mask", adamh_mask, stacks.blocks(params))
        blocks = zip(chosen, blocks_of(params, stacks), strict=True)
        flags = [flag and not block.is_vector for flag, block in blocks]
        if any(chosen) and not any(flags):
            raise ValueError(
                f"adamh_mask must select a parameter with two or more axes, got {adamh_mask}, "
                "which selects vectors alone. `others` moves all vectors: leave out adamh_mask."
            )
        return flags

    def movers(params: optax.Params) -> list[str]:
        """What moves each parameter: Muon or Adam on a sphere, or the others."""
        kinds = zip(heads(params), axes.are_matrices(params, matrix_mask), strict=True)
        return ["adamh" if head else "muonh" if matrix else "others" for head, matrix in kinds]

    def at_init(params: optax.Params) -> None:
        chosen = select_leaves("matrix_mask", matrix_mask, stacks.blocks(params))
        are_heads = heads(params)
        movable = [flag and not head for flag, head in zip(chosen, are_heads, strict=True)]
        check_matrices("muonh", axes, params, movable, may_be_none=any(are_heads))

    directions = partition(
        "muonh",
        {
            "muon": orthogonalize_momentum(
                beta,
                eps=eps,
                nesterov=nesterov,
                bias_correction=bias_correction,
                grad_averaging=grad_averaging,
                ns_coeffs=ns_coeffs,
                ns_steps=ns_steps,
                ns_dtype=ns_dtype,
                ns_gram=ns_gram,
                matrix_axes=matrix_axes,
                stacked=stacked,
                mu_dtype=mu_dtype,
            ),
            "adam": scale_by_adam(b1, b2, adam_eps, mu_dtype=mu_dtype),
        },
        lambda params: ["muon" if mover == "muonh" else "adam" for mover in movers(params)],
        stacks,
        None if is_optimizer(others) else at_init,  # otherwise only matrices are seen here
    )
    if not is_optimizer(others):
        steps = steps_beside_spheres(movers, rate, others, radius, axes.stacked_matrices)
        return chain(directions, steps)
    spheres = hyperball(rate, radius=radius, stacked=axes.stacked_matrices)
    return partition(
        "muonh",
        {"muonh": chain(directions, spheres), "others": others},
        lambda params: [mover if mover == "others" else "muonh" for mover in movers(params)],
        stacks,
        at_init,
    )
