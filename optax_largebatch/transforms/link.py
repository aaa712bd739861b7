"""What a link of a chain is: a gradient transformation told for one leaf.

Layer-wise optimizers alternate between work on single elements and norms of whole blocks. A link
says both in one generator, its *leaf program*: it works on the gradient of one leaf and, where it
needs a norm, yields a request for it and gets the norm back::

    def leaf(update, at):
        param_norm, update_norm = yield BlockNorms(at.param, update)
        return param_norm / update_norm * update, at.state

The programs of all leaves run in step: each advances to its next request, all requests of that
round are answered together, and so on. The norms of a whole network then take one reduction for
each round, however many leaves it has, and the links of a chain share their rounds.

Leaf programs never see dtypes: parameter, gradient and state reach them in the accumulation dtype
of the leaf (float32, or float64), and what they return is cast to the parameter's dtype and, for
the state, to the dtype that the state had.
"""

from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_largebatch.params.leaves import Leaves


class BlockNorms:
    """A request for the norms of arrays of one leaf; answered by a list of scalars."""

    def __init__(self, *arrays: jax.Array):
        self.arrays = arrays


class GlobalNorm:
    """A request for the norm of what all leaves hand in together; answered by a list of one."""

    def __init__(self, array: jax.Array):
        self.arrays = (array,)


class Stored:
    """Says that an array goes into the state in a dtype; answered by the array as stored.

    What follows then works with what the next step will read, not with a more precise copy.
    """

    def __init__(self, array: jax.Array, dtype: jax.typing.DTypeLike | None):
        self.array = array
        self.dtype = dtype


Request = BlockNorms | GlobalNorm
LeafProgram = Generator[Request | Stored, Any, tuple[jax.Array, Any]]


class Leaf(NamedTuple):
    """What a leaf program knows of its leaf besides the gradient."""

    param: Any
    """The parameter, or None when `update` was called without parameters."""
    start: Any
    """The parameter at the start of the step: `param`, unless a link has moved that already."""
    state: Any
    """The link's state, with this leaf's array in place of each tree."""
    scalars: Any
    """The link's scalars of this step."""
    choice: Any
    """What the link chose for this leaf when it was traced, such as a mask's boolean."""


@dataclasses.dataclass(frozen=True)
class Link:
    """A gradient transformation told leaf by leaf.

    Attributes:
        init: the initial state for a tree of parameters; a NamedTuple.
        leaf: the leaf program: takes the gradient and a `Leaf`, returns the update and the leaf's
            new state.
        trees: the fields of the state that are trees like the parameters.
        vectors: the fields of the state that are vectors with one entry for each block.
        inner: the fields of the state that are the states of other links.
        scalars: the scalars of a step, from the state. A field named `count` counts the steps.
        choices: a hashable choice for each leaf, from the parameters.
        needs_params: whether `update` must be given the parameters.
    """

    init: Callable[[Any], Any]
    leaf: Callable[[jax.Array, Leaf], LeafProgram]
    trees: tuple[str, ...] = ()
    vectors: tuple[str, ...] = ()
    inner: Mapping[str, "Link"] = dataclasses.field(default_factory=dict)
    scalars: Callable[[Any], Any] = lambda state: ()
    choices: Callable[[Leaves], Sequence[Hashable]] = lambda leaves: [()] * len(leaves.arrays)
    needs_params: bool = False

    def split(self, state: Any, leaves: Leaves) -> list[Any]:
        """The state of each leaf; last step's entries of the vectors are no input of it."""
        columns: dict[str, list[Any]] = {}
        for name in self.trees:
            columns[name] = leaves.align(f"the state's {name}", getattr(state, name))
        for name, link in self.inner.items():
            columns[name] = link.split(getattr(state, name), leaves)
        for name in self.vectors:
            columns[name] = [None] * len(leaves.arrays)
        return [
            state._replace(**{name: column[index] for name, column in columns.items()})
            for index in range(len(leaves.arrays))
        ]

    def join(self, state: Any, parts: list[Any], leaves: Leaves) -> Any:
        """The new state, from the old one and the new state of each leaf."""
        new: dict[str, Any] = {}
        for name in self.trees:
            old = leaves.align(f"the state's {name}", getattr(state, name))
            columns = zip((getattr(part, name) for part in parts), old, strict=True)
            new[name] = leaves.rebuild([jnp.asarray(now, like.dtype) for now, like in columns])
        for name, link in self.inner.items():
            inner_parts = [getattr(part, name) for part in parts]
            new[name] = link.join(getattr(state, name), inner_parts, leaves)
        for name in self.vectors:
            vector = getattr(state, name)
            entries = [getattr(part, name) for part in parts]
            kept = [vector[i] if entry is None else entry for i, entry in enumerate(entries)]
            if kept:
                new[name] = jnp.stack([jnp.asarray(entry, vector.dtype) for entry in kept])
        if "count" in state._fields:
            new["count"] = optax.safe_increment(state.count)
        return state._replace(**new)


def elementwise(
    function: Callable[[jax.Array, Leaf], tuple[jax.Array, Any]],
) -> Callable[[jax.Array, Leaf], LeafProgram]:
    """Makes a leaf program of a function that needs no norm."""

    @functools.wraps(function)
    def leaf(update: jax.Array, at: Leaf) -> LeafProgram:
        yield from ()
        return function(update, at)

    return leaf


def in_parallel(*programs: LeafProgram) -> Generator[Any, Any, list[tuple[jax.Array, Any]]]:
    """Runs several programs for the same leaf side by side, as one program.

    The block norms that they ask for in a round are asked for together.
    """
    results: dict[int, tuple[jax.Array, Any]] = {}
    waiting: dict[int, BlockNorms] = {}
    answers: dict[int, Any] = dict.fromkeys(range(len(programs)))
    while answers:
        for index, answer in answers.items():
            try:
                request = programs[index].send(answer)
                while not isinstance(request, BlockNorms):
                    request = programs[index].send((yield request))
                waiting[index] = request
            except StopIteration as end:
                results[index] = end.value
        answers = {}
        if waiting:
            norms = iter(
                (yield BlockNorms(*(x for asked in waiting.values() for x in asked.arrays)))
            )
            answers = {i: [next(norms) for _ in asked.arrays] for i, asked in waiting.items()}
            waiting = {}
    return [results[index] for index in range(len(programs))]
