"""A learning rate whose warm-up counts micro-batches and whose schedule counts steps."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_largebatch.arguments import Scalar
from optax_largebatch.engine.requests import Leaf
from optax_largebatch.engine.state import Shared, StateOf, declare
from optax_largebatch.engine.to_optax import leaf_transform_of, transformation
from optax_largebatch.engine.transform import LeafTransform
from optax_largebatch.params.groups import Hyperparameter, as_grouped
from optax_largebatch.schedules.warmup import as_float
from optax_largebatch.transforms.learning_rate import (
    ScaleByLearningRateState,
    scale_by_learning_rate,
)


class ScaleByWarmedUpRateState(NamedTuple):
    """State of the learning rate of `lbsgd`."""

    rate: ScaleByLearningRateState
    """The macro-batches so far, and the rates of the last step."""
    micro_batches: jax.Array
    """Micro-batches so far, shape (). The warm-up counts these, because `flush` makes macro-batches
    that are smaller than usual."""


def scale_by_warmed_up_rate(
    learning_rate: Hyperparameter, multiplier: optax.Schedule, first: Scalar
) -> optax.GradientTransformationExtraArgs:
    """`scale_by_learning_rate`, times a schedule of the micro-batches.

    Args:
        learning_rate: the rate; a schedule counts steps.
        multiplier: the schedule of the micro-batches, which `count_micro_batches` counts.
        first: micro-batches that the warm-up counts as taken before training begins.

    Returns:
        A transformation; its state is a `ScaleByWarmedUpRateState`.
    """
    rates = as_grouped("learning_rate", learning_rate)

    def scalars(state: ScaleByWarmedUpRateState) -> tuple[Any, ...]:
        grown = multiplier(first + as_float(state.micro_batches))
        return tuple(rate * grown for rate in rates.at(state.rate.count))

    def leaf(update: jax.Array, at: Leaf) -> tuple[jax.Array, Any]:
        rate = at.scalars[at.choice]
        own = at.state.rate._replace(learning_rates=rate)
        return -rate * update, at.state._replace(rate=own)

    return transformation(
        LeafTransform(
            leaf,
            state=declare(
                ScaleByWarmedUpRateState,
                rate=StateOf(leaf_transform_of(scale_by_learning_rate(learning_rate))),
                micro_batches=Shared(lambda params: jnp.zeros([], jnp.int32)),
            ),
            scalars=scalars,
            choices=lambda leaves: rates.indices(leaves.tree),
            given="parts",
            facts=lambda params: [{"rate": own} for own in rates.of_each(params)],
        )
    )
