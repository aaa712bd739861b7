"""Heavy-ball momentum."""

from typing import Any, NamedTuple

import jax
import optax

from optax_largebatch.arguments import (
    Scalar,
    check_dtype,
    check_flag,
    check_number,
    renamed,
)
from optax_largebatch.engine.recorded_states import of_all
from optax_largebatch.engine.requests import Leaf, LeafProgram, materialize
from optax_largebatch.engine.state import PerParameter, declare
from optax_largebatch.engine.to_optax import transformation
from optax_largebatch.engine.transform import LeafTransform


class AccumulateMomentumState(NamedTuple):
    """State of `accumulate_momentum`."""

    trace: optax.Updates
    """The momentum buffer, like the parameters."""


class _Scalars(NamedTuple):
    """The numbers of one step."""

    decay: Any
    weight: Any
    """The weight of the new update in the momentum buffer."""


@renamed(decay="momentum")
def accumulate_momentum(
    momentum: Scalar = 0.9,
    *,
    nesterov: bool = False,
    averaging: bool = False,
    accumulator_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Adds a decaying sum of the earlier updates.

    .. math:: b_t = \mu b_{t-1} + u_t, \qquad u_t \leftarrow b_t
        \quad\text{or, Nesterov's,}\quad u_t + \mu b_t

    Like `optax.trace`, but with a float32 buffer for parameters of lower precision. In a chain, the
    buffer holds steps after `scale_by_learning_rate`, and directions before it.

    Args:
        momentum: share of the buffer that stays in each step, so that it sums about :math:`1 / (1 -
            \mu)` updates: usually 0.9. :math:`\mu`, in [0, 1).
        nesterov: whether to look one step ahead.
        averaging: True gives :math:`u_t` the weight :math:`1 - \mu` in :math:`b_t`, which is then a
            running mean, as long as one update.
        accumulator_dtype: dtype in which the buffer is kept; None for float32 (float64 for float64
            parameters).

    Returns:
        A transformation; its state is an `AccumulateMomentumState`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import accumulate_momentum
        >>> transform = accumulate_momentum(0.5)
        >>> state = transform.init(jnp.zeros(1))
        >>> for _ in range(2):
        ...     updates, state = transform.update(jnp.ones(1), state)
        >>> print(updates)
        [1.5]
    """
    check_number("momentum", momentum, "[0, 1)")
    check_flag("nesterov", nesterov)
    check_flag("averaging", averaging)
    check_dtype("accumulator_dtype", accumulator_dtype)

    def leaf(update: jax.Array, at: Leaf) -> LeafProgram:
        step: _Scalars = at.scalars
        update = step.weight * update
        trace = yield materialize(step.decay * at.state.trace + update, accumulator_dtype)
        return update + step.decay * trace if nesterov else trace, at.state._replace(trace=trace)

    return transformation(
        LeafTransform(
            leaf,
            state=declare(AccumulateMomentumState, trace=PerParameter(accumulator_dtype)),
            scalars=lambda state: _Scalars(momentum, 1 - momentum if averaging else 1.0),
            given="parts",
            facts=of_all({"direction": "momentum"}),
        )
    )
