"""Several optimizers or transforms as one, each for parameters of its own."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
from typing import Any, TypeGuard

import jax
import optax

from optax_largebatch import engine
from optax_largebatch.arguments import Scalar, check_number_or_schedule, check_state
from optax_largebatch.engine.state import Field
from optax_largebatch.params.groups import Owners
from optax_largebatch.params.leaves import Leaves, check_params, gradients_of, leaves_of
from optax_largebatch.params.paths import wraps_one_array
from optax_largebatch.params.placement import replicated
from optax_largebatch.params.stacked import Stacked, Stacks
from optax_largebatch.transforms.chain import given_of

Others = optax.GradientTransformation | Scalar | optax.Schedule | None
"""What `others` may be: an optimizer, a learning rate for Adam, or None for Adam's usual one."""

OF_OTHERS = (
    "The other parameters have an optimizer of their own, which is an argument: others=0.0003 for "
    "Adam, or others=optax.nadamw(0.0003, b1=..., b2=..., eps_root=..., weight_decay=...)."
)


def partition(
    who: str,
    optimizers: Mapping[str, optax.GradientTransformation],
    owners: Owners,
    stacked: Stacked,
    at_init: Callable[[optax.Params], None] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Like `optax.partition`, but its errors name the cause.

    Optimizers that are all made of transformations of this library take one step together.

    Args:
        who: the optimizer that is made of the others, for messages.
        optimizers: the other optimizers, by name.
        owners: says which optimizer moves which parameter.
        stacked: the stacks among the parameters.
        at_init: looks at all parameters in `init`, to warn or to raise; None for nothing.
    """
    found = {name: engine.leaf_transform_of(one) for name, one in optimizers.items()}
    transforms = {name: one for name, one in found.items() if one is not None}
    if len(transforms) == len(optimizers):
        return engine.transformation(partitioned(who, transforms, owners, stacked, at_init))
    each = {name: optax.with_extra_args_support(one) for name, one in optimizers.items()}
    # Nothing runs it; its `init` says what the stacks are, to readers, too.
    of_stacks = engine.LeafTransform(
        lambda update, at: (update, at.state), stacked=stacked, at_init=at_init, name=who
    )

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


def is_optimizer(others: Others) -> TypeGuard[optax.GradientTransformation]:
    """Whether `others` is an optimizer.

    Raises:
        TypeError: it is nothing that `Others` says.
        ValueError: the learning rate is negative.
    """
    if isinstance(others, optax.GradientTransformation):
        return True
    if others is not None:
        check_number_or_schedule("others, if it is no optimizer,", others, "[0, inf)")
    return False


def partitioned(
    who: str,
    transforms: Mapping[str, engine.LeafTransform],
    owners: Owners,
    stacked: Stacks,
    at_init: Callable[[optax.Params], None] | None,
) -> engine.LeafTransform:
    """The transform that moves each parameter by its owner among others.

    The owners work in one step, so what they need to know at one point is taken together. State and
    numbers are those of `optax.partition`.

    Args:
        who: the optimizer that is made of the others, for messages.
        transforms: the others, by name.
        owners: says which one moves which parameter.
        stacked: the argument of the optimizer.
        at_init: looks at all parameters in `init`, to warn or to raise; None for nothing.
    """
    states = _StatesOfOwners(who, transforms, owners)

    def choices(leaves: Leaves) -> list[tuple[str, Any]]:
        found: dict[int, tuple[str, Any]] = {}
        for name, (numbers, part) in states.by_owner(leaves).items():
            chosen = transforms[name].choose(part)
            found |= {i: (name, one) for i, one in zip(numbers, chosen, strict=True)}
        return [found[i] for i in range(len(leaves.arrays))]

    def scalars(state: Any) -> dict[str, Any]:
        of_each = state.inner_states
        return {name: x.scalars(of_each[name].inner_state) for name, x in transforms.items()}

    def leaf(update: jax.Array, at: engine.Leaf) -> engine.LeafProgram:
        name, choice = at.choice
        parts = at.state.inner_states
        here = at._replace(
            state=parts[name], scalars=at.scalars[name], choice=choice, run=at.run.inside(name)
        )
        update, new = yield from transforms[name].program(update, here)
        return update, at.state._replace(inner_states=parts | {name: new})

    return engine.LeafTransform(
        leaf,
        state=engine.declare(optax.transforms.PartitionState, inner_states=states),
        scalars=scalars,
        choices=choices,
        needs_params=True,
        stacked=stacked,
        given=given_of(list(transforms.values())),
        at_init=at_init,
        takes_complex=True,
        name=who,
    )


@dataclasses.dataclass(frozen=True, eq=False)  # a dictionary has no hash
class _StatesOfOwners(Field):
    """The states of several transforms by name, each for its own parameters."""

    who: str
    transforms: Mapping[str, engine.LeafTransform]
    owners: Owners

    def by_owner(self, leaves: Leaves) -> dict[str, tuple[list[int], Leaves]]:
        """The numbers of the leaves of each owner, and these leaves; all others are hidden."""
        names = self.owners(leaves.tree)
        found = {}
        for owner in self.transforms:
            numbers = [i for i, name in enumerate(names) if name == owner]
            tree = shown(leaves.tree, names, owner)
            specs = None if leaves.specs is None else [leaves.specs[i] for i in numbers]
            arrays = [leaves.arrays[i] for i in numbers]
            treedef = jax.tree.structure(tree)
            found[owner] = numbers, Leaves(tree, treedef, arrays, specs, leaves.mesh)
        return found

    def init(self, params: optax.Params) -> Any:
        names, states = self.owners(params), {}
        for owner, transform in self.transforms.items():
            state = transform.init(shown(params, names, owner))
            # The state of an owner of nothing has no parameter that says where it lies.
            states[owner] = optax.MaskedState(
                state if owner in names else replicated(state, params)
            )
        return states

    def split(self, name: str, value: Any, leaves: Leaves) -> Sequence[Any]:
        """For each leaf the part of its owner's state, and None for each other owner."""
        parts = [dict.fromkeys(self.transforms) for _ in leaves.arrays]
        for owner, (numbers, its_leaves) in self.by_owner(leaves).items():
            state = value[owner].inner_state
            split = self.transforms[owner].split(state, its_leaves)
            for i, part in zip(numbers, split, strict=True):
                parts[i][owner] = part
        return parts

    def kinds(self, leaf_value: Any) -> Any:
        return {
            owner: None if state is None else self.transforms[owner].kinds(state)
            for owner, state in leaf_value.items()
        }

    def inside(self, value: Any) -> list[tuple[Any, Any]]:
        if value.keys() != self.transforms.keys():
            raise TypeError(
                f"state must be that of {self.who}, which keeps states of "
                f"{_listed(self.transforms)}; got states of {_listed(value)}. It is the state of "
                "another optimizer or of other options. Call `init` of this optimizer, or restore "
                "into the state that `init` returns."
            )
        inner = {owner: getattr(part, "inner_state", part) for owner, part in value.items()}
        return [(self.transforms[owner], x) for owner, x in inner.items() if x is not None]

    def join(self, name: str, old: Any, leaf_values: list[Any], leaves: Leaves) -> Any:
        new = {}
        for owner, (numbers, its_leaves) in self.by_owner(leaves).items():
            of_owner = [leaf_values[i][owner] for i in numbers]
            state = old[owner].inner_state
            joined = self.transforms[owner].join(state, of_owner, its_leaves)
            new[owner] = optax.MaskedState(joined)
        return new


def shown(tree: Any, names: Sequence[str], owner: str) -> Any:
    """The tree with the leaves of one owner; all others are hidden by `optax.MaskedNode`.

    A box around an array is hidden with it. With nothing in it, it would still say how the array is
    split, and Flax nnx would try to do so.

    Args:
        tree: the parameters.
        names: the owner of each leaf.
        owner: whose leaves are shown.
    """
    nodes, structure = jax.tree.flatten(tree, is_leaf=wraps_one_array)
    remaining = iter(names)
    kept = []
    for node in nodes:
        owners = [next(remaining) for _ in jax.tree.leaves(node)]
        kept.append(node if owners in ([], [owner]) else optax.MaskedNode())
    return structure.unflatten(kept)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(map(repr, names)))
