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
    """As `optax.partition`, with errors that name what is wrong.

    Args:
        who: the optimizer that is made of the others, for messages.
        optimizers: the others, by name.
        owners: from the parameters a tree like them, of these names.
    """
    partitioned = optax.partition(optimizers, owners)

    def init(params: optax.Params) -> optax.OptState:
        leaves_of("params", params)
        return partitioned.init(params)

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        if params is None:
            raise ValueError(
                f"params must be given to `update` of {who}, because they say which optimizer is "
                "for which; got None. Call optimizer.update(grads, state, params)."
            )
        check_state(who, optax.transforms.PartitionState, state)
        gradients_of(updates, params)
        return partitioned.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)
