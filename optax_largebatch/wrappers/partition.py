"""Several optimizers, each for parameters of its own."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import optax

from optax_largebatch.arguments import check_state
from optax_largebatch.params.leaves import gradients_of, leaves_of


def partition(
    who: str,
    optimizers: Mapping[Hashable, optax.GradientTransformation],
    owners: Callable[[optax.Params], Any],
) -> optax.GradientTransformationExtraArgs:
    """Like `optax.partition`, but its errors name the cause.

    Args:
        who: the optimizer that is made of the others, for messages.
        optimizers: the other optimizers, by name.
        owners: a function of the parameters that returns a tree of these names, like the
            parameters.
    """

    def init(params: optax.Params) -> optax.OptState:
        leaves_of("params", params)
        return optax.partition(optimizers, owners).init(params)

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        if params is None:
            raise ValueError(
                f"params must be given to `update` of {who}, because they decide which "
                "optimizer moves which parameter; got None. Call "
                "optimizer.update(grads, state, params)."
            )
        check_state(who, optax.transforms.PartitionState, state)
        gradients_of(updates, params)
        # With `owners` itself, optax would ask about the gradients, some of which may be None.
        partitioned = optax.partition(optimizers, owners(params))
        return partitioned.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)
