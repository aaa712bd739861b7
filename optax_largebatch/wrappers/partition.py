"""Several optimizers, each for parameters of its own."""

from collections.abc import Mapping
from typing import Any

import jax
import optax

from optax_largebatch.arguments import check_state
from optax_largebatch.engine.to_optax import leaf_transform_of, transformation
from optax_largebatch.engine.transform import LeafTransform
from optax_largebatch.params.groups import Owners
from optax_largebatch.params.leaves import gradients_of, leaves_of
from optax_largebatch.params.stacked import Stacked
from optax_largebatch.transforms.partitioned import partitioned, shown
from optax_largebatch.wrappers.inner import check_params


def partition(
    who: str, optimizers: Mapping[str, Any], owners: Owners, stacked: Stacked
) -> optax.GradientTransformationExtraArgs:
    """Like `optax.partition`, but its errors name the cause.

    Optimizers that are all made of transformations of this library take one step together.

    Args:
        who: the optimizer that is made of the others, for messages.
        optimizers: the other optimizers, by name.
        owners: says which optimizer moves which parameter.
        stacked: the stacks among the parameters.
    """
    transforms = {name: leaf_transform_of(optimizer) for name, optimizer in optimizers.items()}
    ours = {name: transform for name, transform in transforms.items() if transform is not None}
    if len(ours) == len(optimizers):
        return transformation(partitioned(who, ours, owners, stacked))
    each = {name: optax.with_extra_args_support(inner) for name, inner in optimizers.items()}
    # Nothing runs it; its `init` says what the stacks are, to readers, too.
    of_stacks = LeafTransform(lambda update, at: (update, at.state), stacked=stacked, name=who)

    def init(params: optax.Params) -> optax.OptState:
        leaves_of("params", params)
        of_stacks.init(params)
        names = owners(params)
        return optax.transforms.PartitionState(
            {
                owner: optax.MaskedState(optimizer.init(shown(params, names, owner)))
                for owner, optimizer in each.items()
            }
        )

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        check_params(who, "chooses by them which optimizer moves which parameter", params)
        check_state(who, optax.transforms.PartitionState, state)
        leaves, gradients = gradients_of(updates, params)
        names, states = owners(params), {}
        for owner, optimizer in each.items():
            numbers = [i for i, name in enumerate(names) if name == owner]
            its_params = shown(params, names, owner)
            structure = jax.tree.structure(its_params)
            new, inner_state = optimizer.update(
                structure.unflatten([gradients[i] for i in numbers]),
                state.inner_states[owner].inner_state,
                its_params,
                **extra_args,
            )
            states[owner] = optax.MaskedState(inner_state)
            for i, update in zip(numbers, structure.flatten_up_to(new), strict=True):
                gradients[i] = update
        return leaves.rebuild(gradients), optax.transforms.PartitionState(states)

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
