"""Runs the leaf programs of a link as passes over memory.

Between two statistics a leaf program is elementwise, so XLA can make one loop of it: one pass. What
costs is what a pass leaves behind for the next, since it has to be written, read back and, on a
CPU, allocated afresh. So passes leave nothing behind but the state and the statistics. Each one
replays the program from its start; where the replay comes to an array that an earlier pass
`Stored`, or to a statistic that one has taken, it is handed that, and what led there is dead code
that XLA drops.

A leaf takes one pass that stores (if it has anything to store) and one for each sum before each of
its rounds of statistics, and one that finishes.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
import contextlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_largebatch import norms
from optax_largebatch.transforms.compilation import merged_inside, outlined, together
from optax_largebatch.transforms.link import Leaf, Link, Request, Statistic, Stored


class LeafArrays(NamedTuple):
    """The arrays that the program of one leaf starts from."""

    gradient: jax.Array
    param: jax.Array | None
    state: Any


class Asked(NamedTuple):
    """A statistic, as it is known before any number is."""

    like: int
    """The position of the first statistic of the round that is the same."""
    kind: str
    kept: tuple[int, ...]


class Round(NamedTuple):
    """A request, as it is known before any number is."""

    of_all_leaves: bool
    asked: tuple[Asked, ...]


class Passes:
    """The passes of one link; each is traced once for leaves of the same signature."""

    def __init__(self, link: Link):
        self._link = link
        self._rounds: dict[Any, tuple[Round, ...]] = {}
        self._store = jax.jit(merged_inside(self._new_stored), static_argnums=0)
        self._part = jax.jit(merged_inside(self._part_of_a_statistic), static_argnums=(0, 1))
        self._finish = jax.jit(merged_inside(self._result), static_argnums=0)

    def run(
        self,
        leaves: Mapping[int, LeafArrays],
        scalars: Any,
        choices: Sequence[Any],
        split: Callable[[int, tuple[int, ...]], norms.Split],
    ) -> dict[int, tuple[jax.Array, Any]]:
        """Runs the programs of all leaves to their ends, in step with each other.

        Args:
            leaves: for each leaf that has a gradient its arrays, by number.
            scalars: the link's scalars of this step.
            choices: the link's choice for each leaf, by number.
            split: how a leaf is split between devices, by number and axes that are kept.

        Returns:
            For each leaf the update, in the accumulation dtype, and the leaf's new state.
        """
        rounds = {i: self._rounds_of(choices[i], leaf, scalars) for i, leaf in leaves.items()}
        stored: dict[int, list[jax.Array]] = {i: [] for i in leaves}
        answers: dict[int, list[Any]] = {i: [] for i in leaves}

        def replay(i: int) -> tuple[Any, ...]:
            return choices[i], leaves[i], scalars, stored[i], answers[i]

        waiting = [i for i in leaves if rounds[i]]
        while waiting:
            # A norm of all leaves has to wait for leaves that ask for their own before it.
            ahead = [i for i in waiting if not rounds[i][len(answers[i])].of_all_leaves]
            asked = {i: rounds[i][len(answers[i])].asked for i in ahead or waiting}
            parts: dict[tuple[int, int], jax.Array] = {}
            for i in asked:
                with _apart():
                    stored[i] += self._store(*replay(i))
                    for k in sorted({statistic.like for statistic in asked[i]}):
                        parts[i, k] = self._part(k, *replay(i))
            splits = {(i, k): split(i, asked[i][k].kept) for i, k in parts}
            whole = together(norms.over_shards(parts, splits))
            if not ahead:
                whole = dict.fromkeys(whole, norms.total(list(whole.values())))
            for i, k in whole:
                if asked[i][k].kind in ("mean", "rms"):
                    whole[i, k] = whole[i, k] / norms.devices_along(splits[i, k].within)
            for i, statistics in asked.items():
                answers[i].append([whole[i, statistic.like] for statistic in statistics])
            waiting = [i for i in waiting if len(answers[i]) < len(rounds[i])]
        return {i: self._finish(*replay(i)) for i in leaves}

    def _rounds_of(self, choice: Any, leaf: LeafArrays, scalars: Any) -> tuple[Round, ...]:
        """The requests of a leaf's program, from an abstract run."""
        arrays, structure = jax.tree.flatten(leaf)
        signature = (choice, structure, *((x.shape, x.dtype) for x in arrays))
        if signature not in self._rounds:
            rounds: list[Round] = []

            def note_rounds(leaf: LeafArrays, scalars: Any) -> None:
                program = self._replay(choice, leaf, scalars, [])
                with contextlib.suppress(StopIteration):
                    request = next(program)
                    while True:
                        same = [(id(x), kind, kept) for x, kind, kept in request.statistics]
                        asked = (
                            Asked(same.index(one), x.kind, x.kept)
                            for one, x in zip(same, request.statistics, strict=True)
                        )
                        rounds.append(Round(request.of_all_leaves, tuple(asked)))
                        # Answers are the same on all devices; those from here would not be.
                        request = program.send(
                            [norms.zeros_of_blocks(x.array, x.kept) for x in request.statistics]
                        )

            jax.eval_shape(note_rounds, leaf, scalars)
            self._rounds[signature] = tuple(rounds)
        return self._rounds[signature]

    def _replay(
        self, choice: Any, leaf: LeafArrays, scalars: Any, stored: list[jax.Array]
    ) -> Generator[Request, list[jax.Array], tuple[jax.Array, Any]]:
        """The leaf's program from its start, up to its requests; answered by sums and means.

        What it stores is taken from `stored` as far as that goes, and then appended to it.
        """
        dtype = norms.accumulation_dtype(
            *(x.dtype for x in (leaf.gradient, leaf.param) if x is not None)
        )
        gradient, param, state = _cast(leaf, dtype)
        at = Leaf(param, param, state, _cast(scalars, dtype), choice)
        program = self._link.leaf(gradient, at)
        answer: Any = None
        position = 0
        while True:
            try:
                request = program.send(answer)
            except StopIteration as end:
                return end.value
            if isinstance(request, Stored):
                if position == len(stored):
                    stored.append(request.array.astype(request.dtype or dtype))
                answer = stored[position].astype(dtype)
                position += 1
            else:
                sums = yield request
                columns = zip(request.statistics, sums, strict=True)
                answer = [
                    (norms.from_sum_of_squares(x) if asked.kind in _ROOTS else x).astype(dtype)
                    for asked, x in columns
                ]

    def _asked(
        self, choice: Any, leaf: LeafArrays, scalars: Any, stored: list[Any], answers: list[Any]
    ) -> Request:
        """The request that follows the answers; `stored` grows to what is stored by then."""
        program = self._replay(choice, leaf, scalars, stored)
        request = next(program)
        for answer in answers:
            request = program.send(answer)
        return request

    def _new_stored(
        self, choice: Any, leaf: LeafArrays, scalars: Any, stored: list[Any], answers: list[Any]
    ) -> list[jax.Array]:
        """What is stored between the last round and the next."""
        known = len(stored)
        self._asked(choice, leaf, scalars, stored := [*stored], answers)
        return stored[known:]

    def _part_of_a_statistic(
        self,
        position: int,
        choice: Any,
        leaf: LeafArrays,
        scalars: Any,
        stored: list[Any],
        answers: list[Any],
    ) -> jax.Array:
        """What this device's part of the leaf adds to a statistic that the next round asks for."""
        request = self._asked(choice, leaf, scalars, [*stored], answers)
        return _part_of(request.statistics[position])

    def _result(
        self, choice: Any, leaf: LeafArrays, scalars: Any, stored: list[Any], answers: list[Any]
    ) -> tuple[jax.Array, Any]:
        """What the program returns."""
        program = self._replay(choice, leaf, scalars, [*stored])
        answer: Any = None
        remaining = iter(answers)
        while True:
            try:
                program.send(answer)
            except StopIteration as end:
                return end.value
            answer = next(remaining)


def _part_of(statistic: Statistic) -> jax.Array:
    """The sum or the mean, of the squares for what is the root of one."""
    array, kind, kept = statistic
    total = norms.sum_of_squares(array, kept) if kind in _ROOTS else norms.block_sum(array, kept)
    return total / max(array.size // max(total.size, 1), 1) if kind in ("mean", "rms") else total


_ROOTS = ("norm", "rms")


def _apart() -> contextlib.AbstractContextManager[Any]:
    """Keeps the passes called here from being merged into one computation.

    XLA on a CPU would see that several of them need the same intermediate result, and keep that
    result, of all leaves at once, in memory. With several devices the calls stay open to the
    compiler, which can combine the reductions of sharded leaves only then.
    """
    return outlined() if jax.device_count() == 1 else contextlib.nullcontext()


def _cast(tree: Any, dtype: jnp.dtype) -> Any:
    """Floating point arrays in `dtype`; Python numbers, which adapt by themselves, as they are."""

    def cast(x: Any) -> Any:
        if type(x) in (bool, int, float) or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return jnp.asarray(x, dtype)

    return jax.tree.map(cast, tree)
