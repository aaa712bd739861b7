"""What a link of a chain is: a gradient transformation told for one leaf.

Layer-wise optimizers alternate between work on single elements and norms of whole blocks. A link
says both in one generator, its *leaf program*: it works on the gradient of one leaf and, where it
needs a norm, yields a request for it and gets the norm back::

    def leaf(update, at):
        param_norm, update_norm = yield block_norms(at.param, update)
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
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_largebatch import norms
from optax_largebatch.engine.compilation import together
from optax_largebatch.params.leaves import Leaves
from optax_largebatch.params.stacked import Stacked


class Statistic(NamedTuple):
    """What a leaf program asks of one array."""

    array: jax.Array
    kind: Literal["norm", "rms", "sum", "mean"]
    kept: tuple[int, ...] = ()
    """The axes that are not summed over; they keep their place in the answer."""


class Request(NamedTuple):
    """A round of statistics, answered by a list with one array for each.

    It has no axes, or, where a statistic keeps some, those of the leaf, so that it broadcasts.
    """

    statistics: tuple[Statistic, ...]
    of_all_leaves: bool = False


def block_norms(*arrays: jax.Array, stacked: tuple[int, ...] = ()) -> Request:
    """Asks for the norms of the blocks of arrays of one leaf."""
    return Request(tuple(Statistic(array, "norm", stacked) for array in arrays))


def block_rms(*arrays: jax.Array, stacked: tuple[int, ...] = ()) -> Request:
    """Asks for the root mean squares of the blocks of arrays of one leaf."""
    return Request(tuple(Statistic(array, "rms", stacked) for array in arrays))


def block_means(*arrays: jax.Array, kept: tuple[int, ...] = ()) -> Request:
    """Asks for the means of arrays of one leaf over all axes but those `kept`."""
    return Request(tuple(Statistic(array, "mean", kept) for array in arrays))


def block_sums(*arrays: jax.Array, kept: tuple[int, ...] = ()) -> Request:
    """Asks for the sums of arrays of one leaf over all axes but those `kept`."""
    return Request(tuple(Statistic(array, "sum", kept) for array in arrays))


def global_norm(array: jax.Array) -> Request:
    """Asks for the norm of what all leaves hand in together."""
    return Request((Statistic(array, "norm"),), of_all_leaves=True)


class Stored:
    """Says that an array goes into the state in a dtype; answered by the array as stored.

    What follows then works with what the next step will read, not with a more precise copy.
    """

    def __init__(self, array: jax.Array, dtype: jax.typing.DTypeLike | None):
        self.array = array
        self.dtype = dtype


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
        trees: the fields of the state that are trees like the parameters; a leaf may be an array
            of any shape, or a tuple of arrays.
        vectors: the fields of the state that are vectors with one entry for each block, and the
            stacks that say which blocks there are.
        shared: the fields of the state that all leaf programs return alike.
        inner: the fields of the state that are the states of other links.
        scalars: the scalars of a step, from the state. A field named `count` counts the steps.
        choices: a hashable choice for each leaf, from the parameters.
        needs_params: whether `update` must be given the parameters.
        by_element: whether the leaf program works on single elements between its requests, so that
            it could be given any part of the leaf.
    """

    init: Callable[[Any], Any]
    leaf: Callable[[jax.Array, Leaf], LeafProgram]
    trees: tuple[str, ...] = ()
    vectors: Mapping[str, Stacked] = dataclasses.field(default_factory=dict)
    shared: tuple[str, ...] = ()
    inner: Mapping[str, "Link"] = dataclasses.field(default_factory=dict)
    scalars: Callable[[Any], Any] = lambda state: ()
    choices: Callable[[Leaves], Sequence[Hashable]] = lambda leaves: [()] * len(leaves.arrays)
    needs_params: bool = False
    by_element: bool = True

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

    def like_leaf(self, part: Any) -> Any:
        """For each array in the state of a leaf, whether it is laid out as the leaf is.

        A tuple of arrays belongs to the axes of the leaf, and is whole on every device.
        """

        def flags(name: str, own: Any) -> Any:
            if name in self.inner:
                return self.inner[name].like_leaf(own)
            alike = name in {*self.trees, *self.vectors} and not isinstance(own, tuple)
            return jax.tree.map(lambda _: alike, own)

        return part._replace(**{name: flags(name, getattr(part, name)) for name in part._fields})

    def join(self, state: Any, parts: list[Any], leaves: Leaves) -> Any:
        """The new state, from the old one and the new state of each leaf."""
        new: dict[str, Any] = {}
        for name in self.trees:
            old = leaves.align(f"the state's {name}", getattr(state, name))
            columns = zip((getattr(part, name) for part in parts), old, strict=True)
            new[name] = leaves.rebuild([_cast_like(now, like) for now, like in columns])
        for name in self.shared:
            old = getattr(state, name)
            moved = (value for part in parts if (value := getattr(part, name)) is not old)
            new[name] = _cast_like(next(moved, old), old)
        for name, link in self.inner.items():
            inner_parts = [getattr(part, name) for part in parts]
            new[name] = link.join(getattr(state, name), inner_parts, leaves)
        for name, stacked in self.vectors.items():
            entries = [getattr(part, name) for part in parts]
            new[name] = one_for_each_block(name, getattr(state, name), entries, stacked, leaves)
        if "count" in state._fields:
            new["count"] = optax.safe_increment(state.count)
        return state._replace(**new)


def _cast_like(now: Any, old: Any) -> Any:
    """New state, with the dtypes of the old."""
    return jax.tree.map(lambda x, like: jnp.asarray(x, like.dtype), now, old)


def one_for_each_block(
    name: str, old: jax.Array, entries: Sequence[Any], stacked: Stacked, leaves: Leaves
) -> jax.Array:
    """A vector with one entry for each block, from what the leaf programs returned.

    Args:
        name: the vector's name, for the message.
        old: the vector of the step before.
        entries: for each leaf an array with one element for each of its blocks, a number for all
            of them, or None where there was no gradient and the old entries stay.
        stacked: the stacks.
        leaves: the leaves.

    Returns:
        The new vector, the same on all devices.

    Raises:
        ValueError: the parameters have more or fewer blocks than they had at `init`.
    """
    parts = []
    start = 0
    for index, axes in enumerate(stacked.axes(leaves.tree)):
        entry = 0 if entries[index] is None else entries[index]
        own = blocks_of_leaf(jnp.asarray(entry, old.dtype), index, axes, leaves)
        parts.append(old[start : start + own.size] if entries[index] is None else own)
        start += own.size
    if start != old.size:
        raise ValueError(
            f"the state's {name} has {old.size} entries and the parameters have {start} blocks. "
            "Call `init` with the whole parameters (outside of shard_map, where a stack is split "
            "between its layers) and with the same `stacked`."
        )
    # Or the kernel that puts them together would compute them all once more.
    parts = list(together(dict(enumerate(parts))).values())
    return jnp.concatenate(parts) if parts else old


def blocks_of_leaf(
    entry: jax.Array, index: int, axes: tuple[int, ...], leaves: Leaves
) -> jax.Array:
    """A vector with one entry for each block of a leaf, the same on all devices."""
    shape = enumerate(leaves.arrays[index].shape)
    own = jnp.broadcast_to(entry, [size if axis in axes else 1 for axis, size in shape])
    for axis in axes:
        own = norms.gathered(own, axis, leaves.axes_along(index, axis))
    return jnp.ravel(own)


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

    The statistics of blocks that they ask for in a round are asked for together.
    """
    results: dict[int, tuple[jax.Array, Any]] = {}
    waiting: dict[int, Request] = {}
    answers: dict[int, Any] = dict.fromkeys(range(len(programs)))
    while answers:
        for index, answer in answers.items():
            try:
                request = programs[index].send(answer)
                while not isinstance(request, Request) or request.of_all_leaves:
                    request = programs[index].send((yield request))
                waiting[index] = request
            except StopIteration as end:
                results[index] = end.value
        answers = {}
        if waiting:
            together = (x for asked in waiting.values() for x in asked.statistics)
            given = iter((yield Request(tuple(together))))
            answers = {i: [next(given) for _ in asked.statistics] for i, asked in waiting.items()}
            waiting = {}
    return [results[index] for index in range(len(programs))]
