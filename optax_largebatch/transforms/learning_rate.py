"""The learning rate, the last transformation of most chains."""

from typing import Any, NamedTuple

import jax
import optax

from optax_largebatch import engine
from optax_largebatch.arguments import refused
from optax_largebatch.params.groups import Hyperparameter, as_grouped


class ScaleByLearningRateState(NamedTuple):
    """State of `scale_by_learning_rate`."""

    count: jax.Array
    """Steps taken, shape ()."""
    learning_rates: jax.Array
    """The rate of each parameter in the last step, in the order of `jax.tree.leaves`; 0 before the
    first step."""


@refused(
    "flip_sign",
    why="A step always goes downhill. To go uphill, put optax.scale(-1.0) in front, or leave "
    "the sign with optax.scale_by_learning_rate(..., flip_sign=False).",
)
def scale_by_learning_rate(learning_rate: Hyperparameter) -> optax.GradientTransformationExtraArgs:
    r"""Turns a direction into a step downhill.

    .. math:: u \leftarrow -\eta_t u

    Like `optax.scale_by_learning_rate`, with two differences. The learning rate may differ between
    groups of parameters. The state is the same for a float and a schedule, so a checkpoint still
    fits after a change from one to the other.

    Args:
        learning_rate: length of a step in units of the direction: relative to the layer behind a
            trust ratio (0.002 to 0.016 for LAMB), that of each element behind Adam. :math:`\eta`, 0
            or more; a float, a schedule, or what `ParamGroups.per_group` returns.

    Returns:
        A transformation; its state is a `ScaleByLearningRateState`.

    Raises:
        TypeError: the learning rate is no number and no schedule.
        ValueError: the learning rate is negative.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import scale_by_learning_rate
        >>> transform = scale_by_learning_rate(0.5)
        >>> updates, _ = transform.update(jnp.array([4.0]), transform.init(jnp.zeros(1)))
        >>> print(updates)
        [-2.]
    """
    values = as_grouped("learning_rate", learning_rate)

    def leaf(update: jax.Array, at: engine.Leaf) -> tuple[jax.Array, Any]:
        rate = at.scalars[at.choice]
        return -rate * update, at.state._replace(learning_rates=rate)

    return engine.transformation(
        leaf,
        state=engine.declare(
            ScaleByLearningRateState, count=engine.Counter(), learning_rates=engine.VectorOfBlocks()
        ),
        scalars=lambda state: values.at(state.count),
        choices=lambda leaves: values.indices(leaves.tree),
        given="parts",
        takes_complex=True,
        facts=lambda params: [{"rate": rate} for rate in values.of_each(params)],
    )
