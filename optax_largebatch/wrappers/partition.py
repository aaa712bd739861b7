"""Several optimizers, each for parameters of its own."""

from collections.abc import Hashable, Mapping
from typing import Any

import optax

from optax_largebatch.arguments import check_state
from optax_largebatch.engine.to_optax import leaf_transform_of, transformation
from optax_largebatch.params.leaves import gradients_of, leaves_of
from optax_largebatch.transforms.partitioned import Owners, partitioned


def partition(
    who: str, optimizers: Mapping[str, optax.GradientTransformation], owners: Owners
) -> optax.GradientTransformationExtraArgs:
    """Like `optax.partition`, but its errors name the cause.

    Optimizers that are all made of transformations of this library take one step together.

    Args:
        who: the optimizer that is made of the others, for messages.
        optimizers: the other optimizers, by name.
        owners: says which optimizer moves which parameter.
    """
    own = {name: leaf_transform_of(optimizer) for name, optimizer in optimizers.items()}
    ours = {name: transform for name, transform in own.items() if transform is not None}
    if len(ours) == len(own):
        return transformation(partitioned(who, ours, owners))

    parts: dict[Hashable, optax.GradientTransformation] = {**optimizers}

    def init(params: optax.Params) -> optax.OptState:
        leaves_of("params", params)
        return optax.partition(parts, owners).init(params)

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
        # With `owners` itself, optax would ask about the gradients, some of which may be None. A
        # tree would be called if it is a module that can be called, as those of Equinox are.
        labels = owners(params)
        partitioned = optax.partition(parts, lambda _: labels)
        return partitioned.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


def check_others(others: Any) -> None:
    """Checks the argument `others`, an optimizer for the parameters that one does not move itself.

    Raises:
        TypeError: it is no optimizer.
    """
    if not isinstance(others, optax.GradientTransformation):
        raise TypeError(
            f"others must be an optimizer, such as lamb(1e-3), or None for Adam; got {others!r}."
        )
