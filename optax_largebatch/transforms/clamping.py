"""Bounds on the parameters themselves."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_largebatch import engine
from optax_largebatch.arguments import Scalar, check_flags, check_integer, check_numbers
from optax_largebatch.params.leaves import Leaves
from optax_largebatch.params.stacked import Stacks, check_stacked, have_several_elements


class ClampParametersState(NamedTuple):
    """State of `clamp_parameters`."""

    count: jax.Array
    """Steps taken, shape ()."""


def clamp_parameters(
    max_value: Scalar,
    *,
    period: int = 1,
    scalars_only: bool = False,
    stacked: Stacks = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Keeps the parameters in an interval, by changing steps that would leave it.

    .. math:: u \leftarrow \min(\max(w + u, -c), c) - w

    Put it last in a chain, where the update is what will be added to the parameters.

    Args:
        max_value: the largest magnitude of an element: 10 for single numbers in ScaledAdam, 20 for
            all in Cain. :math:`c`, positive.
        period: how many steps are between two clampings; the first is in the first step. 10 in
            Cain. 1 or more.
        scalars_only: whether only blocks of one element are clamped.
        stacked: the parameters that stack layers, so that each layer counts its own elements:
            patterns with their axes, `{"layers/": 0}`, or the result of `stacked_layers`. None if
            there are none.

    Returns:
        A transformation that needs parameters; its state is a `ClampParametersState`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import clamp_parameters
        >>> params = jnp.array([0.5, -3.0])
        >>> transform = clamp_parameters(2.0)
        >>> updates, _ = transform.update(jnp.ones(2), transform.init(params), params)
        >>> print(updates)
        [1. 1.]

    References:
        icefall, `optim.py`: `scalar_max` of `ScaledAdam` and, in July 2022, `param_max` of `Cain`.
    """
    check_numbers("(0, inf)", max_value=max_value)
    check_integer("period", period, at_least=1)
    check_flags(scalars_only=scalars_only)
    stacks = check_stacked(stacked)

    def choices(leaves: Leaves) -> list[bool]:
        """Whether each leaf is clamped."""
        several = have_several_elements(leaves, stacks)
        return [not (scalars_only and flag) for flag in several]

    def leaf(
        update: jax.Array,
        at: engine.Leaf,
    ) -> tuple[jax.Array, ClampParametersState]:
        if not at.choice:
            return update, at.state
        limit, is_due = at.scalars
        clamped = jnp.clip(at.param + update, -limit, limit) - at.param
        return jnp.where(is_due, clamped, update), at.state

    return engine.transformation(
        leaf,
        state=engine.declare(ClampParametersState, count=engine.Counter()),
        scalars=lambda state: (max_value, state.count % period == 0),
        choices=choices,
        needs_params=True,
        given="parts",
    )
