"""Bounds on the parameters themselves."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_largebatch.arguments import Scalar, check_flag, check_integer, check_number
from optax_largebatch.engine.requests import Leaf
from optax_largebatch.engine.state import Counter, declare
from optax_largebatch.engine.to_optax import transformation
from optax_largebatch.engine.transform import LeafTransform
from optax_largebatch.params.leaves import Leaves
from optax_largebatch.params.stacked import Stacks, check_stacked


class ClampParametersState(NamedTuple):
    """State of `clamp_parameters`."""

    count: jax.Array
    """Steps taken, shape ()."""


class _Scalars(NamedTuple):
    """The numbers of one step."""

    limit: Any
    due: jax.Array
    """Whether the parameters are clamped in this step."""


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

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range.

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
    check_number("max_value", max_value, "(0, inf)")
    check_integer("period", period, at_least=1)
    check_flag("scalars_only", scalars_only)
    stacks = check_stacked(stacked)

    def choices(leaves: Leaves) -> list[bool]:
        """Whether each leaf is clamped."""
        axes = enumerate(stacks.axes(leaves.tree))
        return [not scalars_only or leaves.one_element(index, own) for index, own in axes]

    def leaf(update: jax.Array, at: Leaf) -> tuple[jax.Array, ClampParametersState]:
        if not at.choice:
            return update, at.state
        step: _Scalars = at.scalars
        clamped = jnp.clip(at.param + update, -step.limit, step.limit) - at.param
        return jnp.where(step.due, clamped, update), at.state

    return transformation(
        LeafTransform(
            leaf,
            state=declare(ClampParametersState, count=Counter()),
            scalars=lambda state: _Scalars(max_value, state.count % period == 0),
            choices=choices,
            needs_params=True,
            given="parts",
        )
    )
