"""A leaf program, run pass by pass over memory.

A leaf program is a pure function. So a pass is the program run again from its start, with the
answers so far, up to the first request that has no answer yet. What it computes on the way and a
pass does not need, XLA drops. Between two passes only the answers are kept, and the arrays that the
program materializes. All else is computed again, which is cheaper than memory for work on single
elements.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_largebatch import norms
from optax_largebatch.engine.arrays import Known, LeafArrays, Scalars, Stop
from optax_largebatch.engine.compilation import abstract_run
from optax_largebatch.engine.requests import EachMatrix, Hoist, Leaf, Materialize, Request
from optax_largebatch.engine.rounds import (
    ROOTS,
    Round,
    Splits,
    distinct,
    identity,
    kind_of,
    round_of,
    term,
)
from optax_largebatch.engine.transform import LeafTransform


class Program:
    """The program of a leaf, and of all leaves that are like it.

    Args:
        transform: the transform.
        choice: its choice for the leaf.
        leaf: the arrays of the leaf.
        scalars: the scalars of the step.
        splits: how the leaf is split between devices.
        dtype_of_all: the dtype of sums over all leaves.
    """

    def __init__(
        self,
        transform: LeafTransform,
        choice: Any,
        leaf: LeafArrays,
        scalars: Scalars,
        splits: Splits,
        dtype_of_all: jnp.dtype,
    ):
        self._transform = transform
        self.choice = choice
        self._splits = splits
        self.kinds = transform.kinds
        self.can_be_cut = transform.given == "parts"
        self._asked: list[Any] = []
        """What the program has asked for when it was first run, in short; None for its end."""
        self.rounds: tuple[Round, ...] = ()
        """The requests, from a first run that computes nothing."""
        self.computed_at_once = 0
        """The sums of one round, at most, whose terms are computed and not read."""
        self.new_numbers: frozenset[int] = frozenset()
        """The places of numbers asked for that become numbers of the state."""
        self.asks_for_numbers = False
        self._known_state: Any = None
        self.closes_over = self._read(leaf, scalars, dtype_of_all)
        """Traced arrays that the program uses and is not given."""

    def run(self, leaf: LeafArrays, scalars: Scalars, known: Known) -> Stop:
        """Runs the program from its start up to the first request that has no answer.

        Args:
            leaf: the arrays of the leaf, or of a part of it.
            scalars: the scalars of the step.
            known: what earlier passes have found out. Arrays that it lacks are computed again.

        Raises:
            RuntimeError: the program asks for something else than it did before.
        """
        dtype = leaf.dtype()
        gradient, param, state = _cast(leaf, dtype)
        at = Leaf(param, param, state, _cast(scalars.tree, dtype), self.choice, ())
        program = self._transform.program(gradient, at)
        stored, new = iter(known.stored), []
        known_numbers, numbers = iter(known.numbers), []
        number, answer = 0, None
        while True:
            try:
                request = program.send(answer)
            except StopIteration as end:
                self._check_same(number, None)
                return Stop(tuple(new), tuple(numbers), None, end.value)
            if isinstance(request, Materialize):
                array = next(stored, None)
                if array is None:
                    array = request.array.astype(request.dtype or dtype)
                    new.append(array)
                answer = array.astype(dtype)
                continue
            if isinstance(request, Hoist):
                answer = [next(known_numbers, jnp.asarray(x)) for x in request.values]
                numbers += answer
                continue
            if isinstance(request, EachMatrix) and not request.array.size:
                answer = request.array
                continue
            self._check_same(number, request)
            if number == len(known.answers):
                return Stop(tuple(new), tuple(numbers), request, None)
            answer = _answer(request, known.answers[number], dtype)
            number += 1

    def result(self, leaf: LeafArrays, scalars: Scalars, known: Known) -> tuple[jax.Array, Any]:
        """The update and the leaf's new state, which has the dtypes of the old one."""
        update, state = self.run(leaf, scalars, known).result
        return update, jax.tree.map(self._kept, leaf.state, state, is_leaf=lambda x: x is None)

    def with_known_numbers(self, old: Any, new: Any) -> Any:
        """The new state, with numbers of blocks that are known without any array.

        XLA takes long to put the constants of a thousand leaves into one vector; NumPy does not.
        """

        def known(old: Any, new: Any, value: Any) -> Any:
            return value if old is None and isinstance(value, np.ndarray) else new

        return jax.tree.map(known, old, new, self._known_state, is_leaf=lambda x: x is None)

    def _kept(self, old: Any, new: Any) -> Any:
        """An array of the new state, or the numbers of blocks where the old one had nothing.

        The number of a leaf that is one block becomes a vector here and not outside, where it would
        be traced once for each of a thousand leaves that are alike.
        """
        if old is not None:
            return jnp.asarray(new, old.dtype)
        several_blocks = any(own.kept for one in self.rounds for own in one.asked)
        if new is None or several_blocks or jnp.size(new) != 1:
            return new
        return jnp.asarray(new, jnp.result_type(new)).reshape(1)

    def _read(self, leaf: LeafArrays, scalars: Scalars, dtype_of_all: jnp.dtype) -> list[Any]:
        """Runs the program once for its rounds, and computes nothing."""
        rounds: list[Round] = []

        def reading(leaf: LeafArrays, scalars: Scalars) -> None:
            leaf = _cast(leaf, leaf.dtype())  # as the program sees it
            known, given = Known(), {id(x) for x in jax.tree.leaves(leaf)}
            while (stop := self.run(leaf, scalars, known)).request is not None:
                request = stop.request
                one = round_of(request, self._splits)
                before = sum(own.asker == one.asker for own in rounds)
                rounds.append(one._replace(turn=before))
                found = self._abstract_answers(request, leaf, dtype_of_all)
                known = known.after(stop.stored, found)
                if isinstance(request, Request):
                    computed = sum(id(x.array) not in given for x in distinct(request))
                    self.computed_at_once = max(self.computed_at_once, computed)
                given |= set(map(id, found))  # what is left of work on matrices is read
            _, state = stop.result
            columns = zip(*map(_leaves, (leaf.state, state)), strict=True)
            written = {id(new) for old, new in columns if old is not None}
            numbers = enumerate(stop.numbers)
            self.new_numbers = frozenset(k for k, x in numbers if id(x) in written)
            self.asks_for_numbers = bool(stop.numbers)
            self._known_state = jax.tree.map(_as_known, state)

        closed_over = abstract_run(reading, leaf, scalars)
        self.rounds = tuple(rounds)
        return closed_over

    def _abstract_answers(
        self, request: Request | EachMatrix, leaf: LeafArrays, dtype_of_all: jnp.dtype
    ) -> list[jax.Array]:
        """Answers of which only the types matter; the passes find them otherwise."""
        if isinstance(request, EachMatrix):
            return [jnp.negative(request.given(leaf.dtype())[0])]
        sums = [
            norms.over_shards({0: norms.block_sum(term(x), own.kept)}, {0: own.split})[0]
            for x, own in zip(distinct(request), round_of(request, self._splits).asked, strict=True)
        ]
        return [x.astype(dtype_of_all) for x in sums] if request.is_global else sums

    def _check_same(self, number: int, request: Request | EachMatrix | None) -> None:
        """Checks that a request, or the end, is what came here in the first run."""
        asked = request.statistics if isinstance(request, Request) else ()
        now = request and (kind_of(request), [x[1:] for x in asked])
        if number == len(self._asked):
            self._asked.append(now)
        elif now != self._asked[number]:
            raise RuntimeError(
                f"{self._transform.name}: the leaf program must ask for the same things whenever "
                "it runs with the same choice; it is run once for each pass. Let it not depend on "
                "anything that changes, such as a counter of its own."
            )


def _answer(request: Any, found: Sequence[jax.Array], dtype: jnp.dtype) -> Any:
    """The answer for the program."""
    if isinstance(request, EachMatrix):
        return found[0].astype(dtype)
    given = dict(zip(map(identity, distinct(request)), found, strict=True))
    sums = [(x.kind in ROOTS, given[identity(x)]) for x in request.statistics]
    return [(norms.from_sum_of_squares(x) if root else x).astype(dtype) for root, x in sums]


def _leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda x: x is None)


def _as_known(value: Any) -> Any:
    """A number as an array of NumPy if it is known while the program is traced."""
    is_known = isinstance(value, bool | int | float | np.generic | np.ndarray)
    return np.asarray(value) if is_known else False


def _cast(tree: Any, dtype: jnp.dtype) -> Any:
    """Floating point arrays in `dtype`; Python numbers, which adapt by themselves, as they are."""

    def cast(x: Any) -> Any:
        if type(x) in (bool, int, float) or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return jnp.asarray(x, dtype)

    return jax.tree.map(cast, tree)
