"""Several optimizers or transforms as one, each for parameters of its own."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any, TypeGuard

import jax
import optax

from optax_largebatch import engine
from optax_largebatch.arguments import Scalar, check_number_or_schedule, quoted
from optax_largebatch.engine.state import Field
from optax_largebatch.params.groups import Owners
from optax_largebatch.params.leaves import Leaves, check_params, gradients_of, leaves_of
from optax_largebatch.params.paths import wraps_one_array
from optax_largebatch.params.placement import replicated
from optax_largebatch.params.stacked import Stacked
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

    Optimizers that are all made of transformations of this library take one step together, so what
    they need to know at one point is taken together. State and numbers are those of
    `optax.partition`.

    Args:
        who: the optimizer that is made of the others, for messages.
        optimizers: the other optimizers, by name.
        owners: says which optimizer moves which parameter.
        stacked: the stacks among the parameters.
        at_init: looks at all parameters in `init`, to warn or to raise; None for nothing.
    """
    all_transforms = {name: engine.leaf_transform_of(x) for name, x in optimizers.items()}
    transforms = {name: x for name, x in all_transforms.items() if x is not None}
    are_ours = len(transforms) == len(optimizers)
    foreign = {name: optax.with_extra_args_support(x) for name, x in optimizers.items()}
    states = _StatesOfOwners(who, transforms if are_ours else foreign, owners)

    def choices(leaves: Leaves) -> list[Any]:
        chosen: list[Any] = [None] * len(leaves.arrays)
        for owner, (indices, its_leaves) in states.by_owner(leaves).items():
            of_owner = transforms[owner].choose(its_leaves)
            for i, choice in zip(indices, of_owner, strict=True):
                chosen[i] = owner, choice
        return chosen

    def scalars(state: Any) -> dict[str, Any]:
        inner = state.inner_states
        return {owner: x.scalars(inner[owner].inner_state) for owner, x in transforms.items()}

    def leaf(update: jax.Array, at: engine.Leaf) -> engine.LeafProgram:
        owner, choice = at.choice
        inner = at.state.inner_states
        here = at._replace(
            state=inner[owner],
            scalars=at.scalars[owner],
            choice=choice,
            run=at.run.inside(owner),
        )
        update, new = yield from transforms[owner].program(update, here)
        return update, at.state._replace(inner_states=inner | {owner: new})

    together = engine.LeafTransform(
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
    if are_ours:
        return engine.transformation(together)

    def init(params: optax.Params) -> optax.OptState:
        leaves_of("params", params)
        return together.init(params)

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, Any]:
        check_params(who, "chooses by them which optimizer moves which parameter", params)
        together.check(state)
        leaves, gradients = gradients_of(updates, params)
        new_states = {}
        for owner, (indices, its_leaves) in states.by_owner(leaves).items():
            its_updates, new_state = foreign[owner].update(
                its_leaves.rebuild([gradients[i] for i in indices]),
                state.inner_states[owner].inner_state,
                its_leaves.tree,
                **extra_args,
            )
            new_states[owner] = optax.MaskedState(new_state)
            for i, update in zip(indices, its_leaves.align("updates", its_updates), strict=True):
                gradients[i] = update
        return leaves.rebuild(gradients), state._replace(inner_states=new_states)

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


@dataclasses.dataclass(frozen=True, eq=False)  # a dictionary has no hash
class _StatesOfOwners(Field):
    """The states of several transforms or optimizers by name, each for its own parameters."""

    who: str
    members: Mapping[str, Any]
    owners: Owners

    def by_owner(self, leaves: Leaves) -> dict[str, tuple[list[int], Leaves]]:
        """The numbers of the leaves of each owner, and these leaves; all others are hidden."""
        names = self.owners(leaves.tree)
        leaves_of_owners = {}
        for owner in self.members:
            indices = [i for i, name in enumerate(names) if name == owner]
            tree = shown(leaves.tree, names, owner)
            specs = None if leaves.specs is None else [leaves.specs[i] for i in indices]
            arrays = [leaves.arrays[i] for i in indices]
            its_leaves = Leaves(tree, jax.tree.structure(tree), arrays, specs, leaves.mesh)
            leaves_of_owners[owner] = indices, its_leaves
        return leaves_of_owners

    def init(self, params: optax.Params) -> Any:
        names = self.owners(params)
        states = {}
        for owner, member in self.members.items():
            state = member.init(shown(params, names, owner))
            # The state of an owner of nothing has no parameter that says where it lies.
            states[owner] = optax.MaskedState(
                state if owner in names else replicated(state, params)
            )
        return states

    def split(self, value: Any, leaves: Leaves) -> Sequence[Any]:
        """For each leaf its part of the owner's state, and None for each other owner."""
        states = [dict.fromkeys(self.members) for _ in leaves.arrays]
        for owner, (indices, its_leaves) in self.by_owner(leaves).items():
            of_owner = self.members[owner].split(value[owner].inner_state, its_leaves)
            for i, state in zip(indices, of_owner, strict=True):
                states[i][owner] = state
        return states

    def kinds(self, leaf_value: Any) -> Any:
        return {
            owner: None if state is None else self.members[owner].kinds(state)
            for owner, state in leaf_value.items()
        }

    def inside(self, value: Any) -> list[tuple[Any, Any]]:
        if value.keys() != self.members.keys():
            raise TypeError(
                f"state must be that of {self.who}, which keeps states of "
                f"{quoted(self.members)}; got states of {quoted(value)}. It is the state of "
                "another optimizer or of other options. Call `init` of this optimizer, or restore "
                "into the state that `init` returns."
            )
        states = {owner: getattr(state, "inner_state", state) for owner, state in value.items()}
        return [
            (member, states[owner])
            for owner, member in self.members.items()
            if isinstance(member, engine.LeafTransform) and states[owner] is not None
        ]

    def join(self, old: Any, leaf_values: list[Any], leaves: Leaves) -> Any:
        new = {}
        for owner, (indices, its_leaves) in self.by_owner(leaves).items():
            of_owner = [leaf_values[i][owner] for i in indices]
            state = old[owner].inner_state
            new[owner] = optax.MaskedState(self.members[owner].join(state, of_owner, its_leaves))
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
