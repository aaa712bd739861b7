"""Heavy-ball momentum."""

from typing import NamedTuple

import jax
import optax

from optax_largebatch import engine
from optax_largebatch.arguments import Scalar, check_dtypes, check_flags, check_numbers, renamed
from optax_largebatch.engine.recorded_states import of_all


class AccumulateMomentumState(NamedTuple):
    """State of `accumulate_momentum`."""

    trace: optax.Updates
    """The momentum buffer, like the parameters."""


@renamed("decay", "momentum")
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
    check_numbers("[0, 1)", momentum=momentum)
    check_flags(nesterov=nesterov, averaging=averaging)
    check_dtypes(accumulator_dtype=accumulator_dtype)

    def leaf(update: jax.Array, at: engine.Leaf) -> engine.LeafProgram:
        decay, weight = at.scalars
        update = weight * update
        trace = decay * at.state.trace + update
        trace = yield engine.materialize(trace, accumulator_dtype)
        direction = update + decay * trace if nesterov else trace
        return direction, at.state._replace(trace=trace)

    return engine.transformation(
        leaf,
        state=engine.declare(AccumulateMomentumState, trace=engine.PerParameter(accumulator_dtype)),
        scalars=lambda state: (momentum, 1 - momentum if averaging else 1.0),
        given="parts",
        takes_complex=True,
        facts=of_all({"direction": "momentum"}),
    )
