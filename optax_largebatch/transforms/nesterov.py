"""The split of Nesterov's momentum into two directions, as in LANS."""

from typing import Any, Literal, NamedTuple

import jax
import optax

from optax_largebatch import engine
from optax_largebatch.arguments import Scalar, check_choice, without_nu_dtype
from optax_largebatch.params.groups import Hyperparameter, as_grouped
from optax_largebatch.params.leaves import Leaves
from optax_largebatch.transforms.adam import ScaleByAdamState, advance_moments, scale_by_adam
from optax_largebatch.transforms.chain import given_of, leaf_transform


class NesterovSplitState(NamedTuple):
    """State of `nesterov_split`."""

    moments: ScaleByAdamState
    """Steps taken and the moments."""
    momentum_branch: Any
    """State of `inner` for the direction of the momentum."""
    gradient_branch: Any
    """State of `inner` for the direction of the gradient."""


@without_nu_dtype
def nesterov_split(
    inner: optax.GradientTransformationExtraArgs,
    *,
    b1: Scalar | optax.Schedule = 0.9,
    b2: Scalar | optax.Schedule = 0.999,
    eps: Scalar = 1e-6,
    bias_correction: Literal["full", "none"] = "full",
    grad_averaging: bool = True,
    mu_dtype: jax.typing.DTypeLike | None = None,
    order: Literal["simultaneous", "sequential"] = "simultaneous",
    learning_rate: Hyperparameter = 1.0,
) -> optax.GradientTransformationExtraArgs:
    r"""Adapts the momentum and the gradient separately and adds the results.

    With the moments :math:`m_t, v_t` of `scale_by_adam` and
    :math:`d = \sqrt{v_t / (1 - b_2^t)} + \epsilon`,

    .. math::

        u_t = b_1 \, f\!\left(\frac{m_t / (1 - b_1^t)}{d}\right)
            + (1 - b_1) \, f\!\left(\frac{g_t}{d}\right),

    where :math:`f` is the transformation `inner`. This is Nesterov's momentum with each of its two
    parts normalised by itself.

    Args:
        inner: the transformation of both directions, a chain of transformations of this library;
            for LANS, weight decay and trust ratio.
        b1: decay rate of the first moment, and its share of the step: usually 0.9. A
            number in [0, 1) or a schedule, as in `scale_by_adam`.
        b2: decay rate of the second moment, an average over about :math:`1 / (1 - b_2)` steps:
            usually 0.999. In the same form.
        eps: keeps the division finite where the gradient has been near 0: 1e-6 in LANS.
            :math:`\epsilon`, positive.
        bias_correction: what makes up for moments that start at 0: `"full"` divides as above,
            `"none"` leaves out both divisions by :math:`1 - b^t`.
        grad_averaging: whether the gradient has the weight :math:`1 - b_1` in :math:`m_t` and in
            :math:`u_t`. False gives it the weight 1.
        mu_dtype: dtype in which the first moment is kept: bfloat16 saves two bytes for each
            parameter. None for float32 (float64 for float64 parameters).
        order: `"simultaneous"` takes both directions from the same parameters; `"sequential"`
            computes the second with the parameters after the first part of the step, :math:`w -
            \eta b_1 f(\cdot)`, except for their norm.
        learning_rate: :math:`\eta`, which only `"sequential"` needs.

    Returns:
        A transformation; its state is a `NesterovSplitState`.

    Raises:
        TypeError: an argument has the wrong type, or `inner` has parts that are not of this
            library.
        ValueError: an argument is out of its range.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import nesterov_split, scale_by_trust_ratio
        >>> transform = nesterov_split(scale_by_trust_ratio())
        >>> params = jnp.array([3.0, 4.0])
        >>> updates, state = transform.update(jnp.ones(2), transform.init(params), params)
        >>> print(updates.round(2), state.moments.mu)
        [3.54 3.54] [0.1 0.1]

    References:
        Zheng et al., *Accelerated Large Batch Optimization of BERT Pretraining in 54 minutes*,
        arXiv 2006.13484, Algorithm 2, lines 9 to 14.
    """
    check_choice("bias_correction", bias_correction, ("full", "none"))
    check_choice("order", order, ("simultaneous", "sequential"))
    rates = as_grouped("learning_rate", learning_rate)
    branch = leaf_transform(inner, "inner")
    adam = leaf_transform(
        scale_by_adam(
            b1,
            b2,
            eps,
            mu_dtype=mu_dtype,
            bias_correction=bias_correction,
            grad_averaging=grad_averaging,
        )
    )

    def scalars(state: NesterovSplitState) -> tuple[Any, ...]:
        of_branches = map(branch.scalars, (state.momentum_branch, state.gradient_branch))
        return adam.scalars(state.moments), *of_branches, rates.at(state.moments.count)

    def leaf(update: jax.Array, at: engine.Leaf) -> engine.LeafProgram:
        adam_scalars, of_momentum, of_gradient, rates = at.scalars
        choice, rate_index = at.choice
        state: NesterovSplitState = at.state
        mu, nu = yield from advance_moments(
            update, at._replace(state=state.moments, scalars=adam_scalars), mu_dtype
        )
        inverse = 1 / adam_scalars.denominator(nu)  # the division takes longest of all
        of_branch = at._replace(choice=choice)
        along_momentum = of_branch._replace(state=state.momentum_branch, scalars=of_momentum)
        along_gradient = of_branch._replace(state=state.gradient_branch, scalars=of_gradient)
        first = branch.program(mu * adam_scalars.mu_scale * inverse, along_momentum)
        if order == "sequential":
            first, first_state = yield from first
            moved = at.param - rates[rate_index] * adam_scalars.b1 * first
            along_gradient = along_gradient._replace(param=moved)
            second, second_state = yield from branch.program(update * inverse, along_gradient)
        else:
            second = branch.program(update * inverse, along_gradient)
            results = yield from engine.in_parallel(first, second)
            (first, first_state), (second, second_state) = results
        step = adam_scalars.b1 * first + adam_scalars.mu_weight * second
        new_moments = state.moments._replace(mu=mu, nu=nu)
        return step, NesterovSplitState(new_moments, first_state, second_state)

    def choices(leaves: Leaves) -> list[Any]:
        return list(zip(branch.choose(leaves), rates.indices(leaves.tree), strict=True))

    return engine.transformation(
        leaf,
        state=engine.declare(
            NesterovSplitState,
            moments=engine.StateOf(adam),
            momentum_branch=engine.StateOf(branch),
            gradient_branch=engine.StateOf(branch),
        ),
        scalars=scalars,
        choices=choices,
        needs_params=branch.needs_params or order == "sequential",
        given=given_of([adam, branch]),
        takes_complex=True,
    )
