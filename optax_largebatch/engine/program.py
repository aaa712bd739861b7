"""A leaf program, run pass by pass over memory.

A leaf program is a pure function. So a pass is the program run again from its start, with the
answers so far, up to the first request without an answer. XLA drops what it computes on the way and
the pass does not need. Between two passes only the answers are kept, and the arrays that the
program materializes. Everything else is computed again, which is cheaper than memory for work on
single elements.
"""

from collections.abc import Callable, Sequence
import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_largebatch import norms
from optax_largebatch.engine.compilation import closed_over_tracers
from optax_largebatch.engine.requests import (
    EachMatrix,
    Hoist,
    Leaf,
    Materialize,
    Request,
    Round,
    Run,
    Splits,
    round_of,
)
from optax_largebatch.engine.state import ArrayKind
from optax_largebatch.engine.transform import LeafTransform, StaticLeaf

Result = tuple[jax.Array, Any]
"""The update of a leaf, and its new state."""

IS_NONE = functools.partial(operator.is_, None)

CONSTANTS = (bool, int, float)
"""Scalars that are known before a step is traced."""


@jax.tree_util.register_pytree_node_class
class Scalars:
    """A tree of scalars; JAX sees only those that are arrays.

    The others are Python's numbers, the options of an optimizer. They become constants of the
    compiled program: as arguments, they would be a dozen for each leaf.

    Args:
        tree: the scalars.
    """

    def __init__(self, tree: Any):
        self.tree = tree
        scalars, structure = jax.tree.flatten(tree)
        # With their types, since `1 == 1.0 == True`.
        constants = [(type(x), x) if type(x) in CONSTANTS else None for x in scalars]
        arrays = [x for x in scalars if type(x) not in CONSTANTS]
        self._flat = arrays, (structure, tuple(constants))

    def tree_flatten(self) -> tuple[list[Any], Any]:
        """The arrays, and the numbers between them."""
        return self._flat

    @classmethod
    def tree_unflatten(cls, static: Any, arrays: Any) -> "Scalars":
        """The reverse of `tree_flatten`."""
        structure, constants = static
        remaining = iter(arrays)
        scalars = [next(remaining) if known is None else known[1] for known in constants]
        return cls(structure.unflatten(scalars))


class LeafArrays(NamedTuple):
    """The arrays that the program of one leaf starts from."""

    gradient: jax.Array
    param: jax.Array | None
    state: Any

    def dtype(self) -> jnp.dtype:
        """The dtype that the leaf is computed with."""
        arrays = jax.tree.leaves((self.gradient, self.param))
        return norms.accumulation_dtype(*[x.dtype for x in arrays])


class PassInputs(NamedTuple):
    """What a pass over a leaf has from the passes before it."""

    stored: tuple[jax.Array, ...] = ()
    """The arrays that were materialized."""
    answers: tuple[tuple[jax.Array, ...], ...] = ()
    """The answers of each round: sums and means, or the result for matrices."""
    hoisted: tuple[jax.Array, ...] = ()
    """The first of the numbers that the program hoists."""

    def after(
        self,
        stored: Sequence[jax.Array],
        answers: Sequence[jax.Array],
    ) -> "PassInputs":
        """The inputs one round later."""
        return self._replace(
            stored=(*self.stored, *stored),
            answers=(*self.answers, tuple(answers)),
        )


class Suspension(NamedTuple):
    """Where a program stops: at a request without an answer, or at its end."""

    stored: tuple[jax.Array, ...]
    """The arrays that it materializes on the way, without those that are known."""
    hoisted: tuple[jax.Array, ...]
    """The numbers that it hoists on the way."""
    request: Request | EachMatrix | None
    result: Any
    """The update and the new state, at the end."""


class Program:
    """The program of a leaf, and of all leaves that are identical to it but for their numbers.

    Args:
        transform: the transform.
        static: what it knows of the leaf beforehand.
        leaf: the arrays of the leaf.
        scalars: the scalars of the step.
        splits: how the leaf is split between devices.
    """

    def __init__(
        self,
        transform: LeafTransform,
        static: StaticLeaf,
        leaf: LeafArrays,
        scalars: Scalars,
        splits: Splits,
    ):
        self._transform = transform
        self.static = static
        self.tileable = transform.given == "parts"
        """Whether it may be run on tiles of the leaf."""
        of_elements = len(jax.tree.leaves((leaf.gradient, leaf.param)))
        self.kinds: list[ArrayKind] = ["per element"] * of_elements
        """The kind of each array of the leaf."""
        self.kinds += jax.tree.leaves(transform.kinds(leaf.state))
        self._dtype = leaf.dtype()
        self._is_read = False
        self._requests: list[Any] = []
        """The requests of the first run without their arrays; None for the end."""
        self.rounds: list[Round] = []
        """The requests, from a first run that computes nothing."""
        self.computed_at_once = 0
        """The most sums of one round whose terms are computed and not read."""
        self.hoists = False
        """Whether it hoists numbers."""
        self.hoisted_state: frozenset[int] = frozenset()
        """Which of the hoisted numbers become numbers of the state."""
        self.result_types: Any = None
        """The shapes and dtypes of the update and of the new state."""
        self.closes_over = closed_over_tracers(functools.partial(self._read, splits), leaf, scalars)
        """Traced arrays that the program uses and is not given."""
        self._is_read = True

    @property
    def result_kinds(self) -> list[ArrayKind]:
        """The kind of each array of the result."""
        _, state = self.result_types
        return ["per element", *jax.tree.leaves(self._transform.kinds(state))]

    def run(
        self,
        leaf: LeafArrays,
        scalars: Scalars,
        inputs: PassInputs,
    ) -> Suspension:
        """Runs the program from its start up to the first request that has no answer.

        Args:
            leaf: the arrays of the leaf, or of a tile of it.
            scalars: the scalars of the step.
            inputs: what it has from earlier passes. Arrays that it lacks are computed again.

        Raises:
            RuntimeError: the program requests something else than it did before.
        """
        dtype = self._dtype
        gradient, param, state = as_precise(leaf, dtype)
        run = Run(is_first=not self._is_read)
        of_step = as_precise(scalars.tree, dtype)
        at = Leaf(param, param, state, of_step, self.static, (), run)
        program = self._transform.program(gradient, at)
        stored_before = iter(inputs.stored)
        stored = []
        hoisted_before = iter(inputs.hoisted)
        hoisted = []
        round_index = 0
        answer = None
        result = None
        while True:
            try:
                request = program.send(answer)
            except StopIteration as end:
                request = None
                result = end.value
            if isinstance(request, Materialize):
                array = next(stored_before, None)
                if array is None:
                    array = norms.cast(request.array, request.dtype or dtype)
                    stored.append(array)
                answer = norms.cast(array, dtype) if request.dtype else array
            elif isinstance(request, Hoist):
                answer = [next(hoisted_before, jnp.asarray(x)) for x in request.values]
                hoisted += answer
            elif isinstance(request, EachMatrix) and not request.array.size:
                answer = request.array
            else:
                self._check_same(round_index, request)
                if request is None or round_index == len(inputs.answers):
                    return Suspension(tuple(stored), tuple(hoisted), request, result)
                answers = inputs.answers[round_index]
                if isinstance(request, EachMatrix):
                    answer = norms.cast(answers[0], dtype)
                else:
                    answer = request.answers(answers, dtype)
                round_index += 1

    def result(
        self,
        leaf: LeafArrays,
        scalars: Scalars,
        inputs: PassInputs,
    ) -> Result:
        """The update and the leaf's new state, which has the dtypes of the old one.

        It has None for numbers that are known without any array; `with_constants` adds them.
        """
        update, state = self.run(leaf, scalars, inputs).result
        return update, jax.tree.map(self._like_old, leaf.state, state, is_leaf=IS_NONE)

    def with_constants(self, state: Any) -> Any:
        """The state of `result`, with the numbers of blocks that are known without any array.

        XLA takes long to put the constants of a thousand leaves into one vector; NumPy does not.
        Nor does XLA see that all devices have the same constant: it would send it around.
        """
        return filled(self._constants, state)

    def arrays_of(
        self,
        leaf: LeafArrays,
        kinds: Sequence[ArrayKind] = ("per element", "per block"),
    ) -> tuple[list[jax.Array], Callable[..., LeafArrays]]:
        """The arrays of a leaf of some kinds, and a function that puts others in their places."""
        arrays, structure = jax.tree.flatten(leaf)
        places = [place for place, kind in enumerate(self.kinds) if kind in kinds]

        def with_others(others: Sequence[jax.Array]) -> LeafArrays:
            replaced = dict(zip(places, others, strict=True))
            return structure.unflatten(replaced.get(place, x) for place, x in enumerate(arrays))

        return [arrays[place] for place in places], with_others

    def _like_old(self, old: Any, new: Any) -> Any:
        """An array of the new state, or the numbers of blocks where the old one had nothing.

        The number of a leaf that is one block becomes a vector here. Outside, that would be traced
        once for each of a thousand identical leaves.
        """
        if old is not None:
            return jnp.asarray(new, old.dtype)
        if new is None or _constant(new) is not None:
            return None
        return new if self._has_several_blocks or new.size != 1 else new.reshape(1)

    def _read(
        self,
        splits: Splits,
        leaf: LeafArrays,
        scalars: Scalars,
    ) -> None:
        """Runs the program once for what it requests and returns; nothing is computed."""
        as_given = as_precise(leaf, self._dtype)
        inputs = PassInputs()
        read = {id(x) for x in jax.tree.leaves(as_given)}
        while (stop := self.run(as_given, scalars, inputs)).request is not None:
            request = stop.request
            info = round_of(request, splits)
            before = [x for x in self.rounds if x.global_of == info.global_of]
            self.rounds.append(info._replace(index=len(before)))
            if isinstance(request, EachMatrix):
                answers = [jnp.negative(request.arrays(self._dtype)[0])]
            else:
                statistics = request.distinct.values()
                computed = sum(id(x.array) not in read for x in statistics)
                self.computed_at_once = max(self.computed_at_once, computed)
                answers = _abstract_sums(request, info)
            read |= set(map(id, answers))
            inputs = inputs.after(stop.stored, answers)
        self._has_several_blocks = any(x.kept for info in self.rounds for x in info.statistics)
        update, state = stop.result
        old, structure = jax.tree.flatten(leaf.state, is_leaf=IS_NONE)
        new = structure.flatten_up_to(state)
        fields = list(zip(old, new, strict=True))
        self._constants = structure.unflatten(
            [_constant(now) if before is None else None for before, now in fields]
        )
        written = {id(now) for before, now in fields if before is not None}
        self.hoists = bool(stop.hoisted)
        self.hoisted_state = frozenset(
            [position for position, x in enumerate(stop.hoisted) if id(x) in written]
        )
        state = structure.unflatten(map(self._like_old, old, new))
        self.result_types = jax.tree.map(jax.typeof, (update, state))

    def _check_same(
        self,
        index: int,
        request: Request | EachMatrix | None,
    ) -> None:
        """Checks that a request, or the end, is what came here in the first run."""
        outline: Any = None if request is None else type(request)
        if isinstance(request, Request):
            outline = request.is_global, [x[1:] for x in request.statistics]
        if index == len(self._requests):
            self._requests.append(outline)
        elif outline != self._requests[index]:
            raise RuntimeError(
                f"{self._transform.name}: the leaf program must ask for the same things whenever "
                "it runs with the same choice; it is run once for each pass. Let it not depend on "
                "anything that changes, such as a counter of its own."
            )


def _abstract_sums(request: Request, info: Round) -> list[jax.Array]:
    """Sums of which only the types matter; the passes take them otherwise."""
    sums = []
    statistics = zip(request.distinct.values(), info.statistics, strict=True)
    for x, (_, kept, split, _) in statistics:
        of_shard = norms.block_sum(x.term, kept)
        sums += norms.over_shards([of_shard], [split])
    return sums


def _constant(value: Any) -> np.ndarray | None:
    """A number as an array of NumPy if it is known while the program is traced."""
    is_known = isinstance(value, bool | int | float | np.generic | np.ndarray)
    return np.asarray(value) if is_known else None


def filled(tree: Any, other: Any) -> Any:
    """A tree, with what another one has in the places where it has None."""
    known, structure = jax.tree.flatten(tree, is_leaf=IS_NONE)
    pairs = zip(known, structure.flatten_up_to(other), strict=True)
    return structure.unflatten([y if x is None else x for x, y in pairs])


def as_precise(tree: Any, dtype: jnp.dtype) -> Any:
    """Arrays as precise as `dtype`; Python numbers, which adapt by themselves, as they are."""
    leaves, structure = jax.tree.flatten(tree)
    for k, x in enumerate(leaves):
        if type(x) in CONSTANTS or not jnp.issubdtype(x.dtype, jnp.inexact):
            continue
        leaves[k] = norms.cast(x, dtype) if jnp.iscomplexobj(x) else jnp.asarray(x, dtype)
    return structure.unflatten(leaves)
