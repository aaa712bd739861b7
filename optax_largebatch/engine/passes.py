"""Runs the leaf programs of a link as passes over memory.

Between two statistics a leaf program is elementwise, so XLA can make one loop of it: one pass. What
costs is what a pass leaves behind for the next, since it has to be written, read back and, on a
CPU, allocated afresh. So passes leave nothing behind but the state and the statistics. Each one
replays the program from its start; where the replay comes to an array that an earlier pass
`Stored`, or to a statistic that one has taken, it is handed that, and what led there is dead code
that XLA drops.

Before each of its rounds of statistics a leaf takes one pass that stores, if it has anything to
store, and those that sum; in the end it takes one that finishes. Leaves that
are split between devices take their rounds in step with each other, since what the devices add to
them travels together. On one CPU a leaf goes on by itself, in a group with others if it is small.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
import contextlib
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_largebatch import norms
from optax_largebatch.engine.compilation import (
    merged_inside,
    on_one_cpu,
    outlined,
    together,
)
from optax_largebatch.engine.link import Leaf, Link, Request, Statistic, Stored
from optax_largebatch.engine.reductions.cpu import ROOTS, block_sum, is_large, sums_on_one_cpu
from optax_largebatch.engine.scalars import Scalars
from optax_largebatch.engine.stages import Between, Stages

MOST_OF_A_GROUP = 2**18
"""The elements of small leaves that are compiled together: as many as are in the caches at once."""


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


class Progress(NamedTuple):
    """How far the passes over a leaf have come."""

    stored: tuple[jax.Array, ...] = ()
    answers: tuple[tuple[jax.Array, ...], ...] = ()
    """The statistics of each round that has been taken."""
    between: Between | None = None
    """What follows from all statistics alone, if that is known already."""

    def after(self, asked: tuple[Asked, ...], stored: list[jax.Array], sums: Any) -> "Progress":
        """The progress one round later; `sums` has one for each position of `_distinct`."""
        found = dict(zip(_distinct(asked), sums, strict=True))
        answer = tuple(found[statistic.like] for statistic in asked)
        return Progress((*self.stored, *stored), (*self.answers, answer))


class Plan(NamedTuple):
    """What a leaf does next by itself."""

    choice: Any
    rounds: tuple[tuple[Asked, ...], ...]
    """What is asked in each."""
    to_the_end: bool
    """Whether no other round follows."""


class Passes:
    """The passes of one link; each is traced once for leaves of the same signature."""

    def __init__(self, link: Link):
        self._link = link
        self._rounds: dict[Any, tuple[Round, ...]] = {}
        self._advance = jax.jit(merged_inside(self._stored_and_sums), static_argnums=(0, 1, 2))
        self._advance_leaf = jax.jit(merged_inside(self._by_itself), static_argnums=0)
        self._advance_group = jax.jit(merged_inside(self._together), static_argnums=0)
        self._finish = jax.jit(merged_inside(self._updated), static_argnums=0)

    def run(
        self,
        leaves: Mapping[int, LeafArrays],
        scalars: Scalars,
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
        progress = dict.fromkeys(leaves, Progress())
        alone = (
            on_one_cpu()
            and not any(map(_is_typed_by_devices, jax.tree.leaves(leaves)))
            and not any(split(i, x.kept).within for i in leaves for r in rounds[i] for x in r.asked)
        )

        def remaining(i: int) -> tuple[Round, ...]:
            return rounds[i][len(progress[i].answers) :]

        waiting = [i for i in leaves if rounds[i]]
        while waiting:
            # A norm of all leaves has to wait for leaves that ask for their own before it.
            ahead = [i for i in waiting if not remaining(i)[0].of_all_leaves]
            if alone and ahead:
                plans = {i: _plan(choices[i], remaining(i)) for i in ahead}
                so_far = {i: (leaves[i], progress[i]) for i in ahead}
                progress |= self._by_groups(plans, scalars, so_far)
            else:
                asked = {i: remaining(i)[0].asked for i in ahead or waiting}
                replays = {i: (choices[i], leaves[i], scalars, progress[i]) for i in asked}
                progress |= self._in_step(asked, alone, not ahead, replays, split)
            waiting = [i for i in waiting if remaining(i)]
        return {i: self._finish(choices[i], leaves[i], scalars, progress[i]) for i in leaves}

    def _by_groups(
        self,
        plans: dict[int, Plan],
        scalars: Scalars,
        so_far: dict[int, tuple[LeafArrays, Progress]],
    ) -> dict[int, Progress]:
        """The progress of leaves that have all of their blocks here, after the rounds of a plan.

        The groups stay apart, or XLA would see that the update needs the direction that a norm was
        taken of, and keep that direction, of all leaves at once, in memory. Inside a group it may:
        what is kept is small, and the other cores have the other leaves of the group to do.
        """
        progress: dict[int, Progress] = {}
        for group in _groups({i: leaf.gradient.size for i, (leaf, _) in so_far.items()}):
            with outlined():
                after = self._advance_group(
                    tuple(plans[i] for i in group), scalars, [so_far[i] for i in group]
                )
            progress |= zip(group, after, strict=True)
        return progress

    def _in_step(
        self,
        asked: dict[int, tuple[Asked, ...]],
        alone: bool,
        of_all_leaves: bool,
        replays: dict[int, Any],
        split: Callable[[int, tuple[int, ...]], norms.Split],
    ) -> dict[int, Progress]:
        """The progress of leaves after one round, for which devices or leaves need each other."""
        stored: dict[int, list[jax.Array]] = {}
        parts: dict[tuple[int, int], jax.Array] = {}
        for i, statistics in asked.items():
            # With several devices XLA has to see all leaves, to combine their reductions.
            with outlined() if alone else contextlib.nullcontext():
                stored[i], sums = self._advance(statistics, alone, *replays[i])
            parts |= {(i, k): x for k, x in zip(_distinct(statistics), sums, strict=True)}
        splits = {(i, k): split(i, asked[i][k].kept) for i, k in parts}
        whole = together(norms.over_shards(parts, splits))
        if of_all_leaves:
            whole = dict.fromkeys(whole, norms.total(list(whole.values())))
        for i, k in whole:
            if asked[i][k].kind in _MEANS:
                whole[i, k] = whole[i, k] / norms.devices_along(splits[i, k].within)
        return {
            i: replays[i][-1].after(
                statistics, stored[i], [whole[i, k] for k in _distinct(asked[i])]
            )
            for i, statistics in asked.items()
        }

    def _together(
        self,
        plans: tuple[Plan, ...],
        scalars: Scalars,
        so_far: list[tuple[LeafArrays, Progress]],
    ) -> list[Progress]:
        """The progress of the leaves of a group."""
        columns = zip(plans, so_far, strict=True)
        return [
            self._advance_leaf(plan, leaf, scalars, progress) for plan, (leaf, progress) in columns
        ]

    def _by_itself(
        self, plan: Plan, leaf: LeafArrays, scalars: Scalars, progress: Progress
    ) -> Progress:
        """The progress of one leaf of a group."""
        for asked in plan.rounds:
            arguments = asked, True, plan.choice, leaf, scalars, progress
            if is_large(leaf.gradient.size):
                with outlined():
                    stored, sums = self._advance(*arguments)
            else:
                stored, sums = self._stored_and_sums(*arguments)
            progress = progress.after(asked, stored, sums)
        if not plan.to_the_end:
            return progress
        stages = self._stages(plan.choice, leaf, scalars, progress)
        return progress._replace(between=stages.first())

    def _rounds_of(self, choice: Any, leaf: LeafArrays, scalars: Scalars) -> tuple[Round, ...]:
        """The requests of a leaf's program, from an abstract run."""
        arrays, structure = jax.tree.flatten(leaf)
        signature = (choice, structure, *((x.shape, x.dtype) for x in arrays))
        if signature not in self._rounds:
            rounds: list[Round] = []

            def note_rounds(leaf: LeafArrays, scalars: Scalars) -> None:
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
        self, choice: Any, leaf: LeafArrays, scalars: Scalars, stored: list[jax.Array]
    ) -> Generator[Request, Sequence[jax.Array], tuple[jax.Array, Any]]:
        """The leaf's program from its start, up to its requests; answered by sums and means.

        What it stores is taken from `stored` as far as that goes, and then appended to it.
        """
        dtype = norms.accumulation_dtype(
            *(x.dtype for x in (leaf.gradient, leaf.param) if x is not None)
        )
        gradient, param, state = _cast(leaf, dtype)
        at = Leaf(param, param, state, _cast(scalars.tree, dtype), choice)
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
                    (norms.from_sum_of_squares(x) if asked.kind in ROOTS else x).astype(dtype)
                    for asked, x in columns
                ]

    def _asked(
        self,
        choice: Any,
        leaf: LeafArrays,
        scalars: Scalars,
        progress: Progress,
        stored: list[jax.Array],
    ) -> Request:
        """The request that follows; `stored` grows to what is stored by then."""
        program = self._replay(choice, leaf, scalars, stored)
        request = next(program)
        for answer in progress.answers:
            request = program.send(answer)
        return request

    def _stored_and_sums(
        self,
        asked: tuple[Asked, ...],
        alone: bool,
        choice: Any,
        leaf: LeafArrays,
        scalars: Scalars,
        progress: Progress,
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """What is stored before the next round, and what this device adds to its statistics."""
        now_stored = [*progress.stored]
        request = self._asked(choice, leaf, scalars, progress, now_stored)
        flags = jax.tree.leaves(self._link.like_leaf(leaf.state))
        state, structure = jax.tree.flatten(leaf.state)
        like_leaf = [x for x, flag in zip(state, flags, strict=True) if flag]
        arrays = (leaf.gradient, leaf.param, like_leaf, now_stored, progress.answers)

        def computed(arrays: Any) -> list[Statistic]:
            """The statistics of the round, of the leaf or of a part of it."""
            gradient, param, like_leaf, stored, answers = arrays
            parts = iter(like_leaf)
            own = [next(parts) if flag else x for x, flag in zip(state, flags, strict=True)]
            part = LeafArrays(gradient, param, structure.unflatten(own))
            before = Progress(answers=answers)
            statistics = self._asked(choice, part, scalars, before, [*stored]).statistics
            return [statistics[k] for k in _distinct(asked)]

        different = [request.statistics[k] for k in _distinct(asked)]
        if alone:
            sums = sums_on_one_cpu(different, computed, arrays, self._link.by_element)
        else:
            sums = [block_sum(x) for x in different]
        for position, k in enumerate(_distinct(asked)):
            if asked[k].kind in _MEANS:
                sums[position] /= max(leaf.gradient.size // max(sums[position].size, 1), 1)
        return now_stored[len(progress.stored) :], sums

    def _updated(
        self, choice: Any, leaf: LeafArrays, scalars: Scalars, progress: Progress
    ) -> tuple[jax.Array, Any]:
        """What the program returns, from where the passes before have come to."""
        if progress.between is None:
            return self._result(choice, leaf, scalars, progress.stored, progress.answers)
        return self._stages(choice, leaf, scalars, progress).second(progress.between)

    def _stages(
        self, choice: Any, leaf: LeafArrays, scalars: Scalars, progress: Progress
    ) -> Stages:
        """The end of the program: what follows from numbers alone, and all else."""

        def result(scalars: Scalars, answers: Any, arrays: Any) -> tuple[jax.Array, Any]:
            return self._result(choice, arrays[0], scalars, arrays[1], answers)

        return Stages(result, scalars, progress.answers, (leaf, progress.stored))

    def _result(
        self, choice: Any, leaf: LeafArrays, scalars: Scalars, stored: Any, answers: Any
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


def _is_typed_by_devices(x: Any) -> bool:
    """Whether the type of an array says that it is split between devices, be it only one."""
    return bool(norms.varying_axes(x)) or any(norms.explicit_spec(x))


def _distinct(asked: tuple[Asked, ...]) -> list[int]:
    """The positions of the statistics of a round, each but once."""
    return sorted({statistic.like for statistic in asked})


def _plan(choice: Any, rounds: tuple[Round, ...]) -> Plan:
    """A leaf's plan for the rounds up to the first of all leaves."""
    own = tuple(x.asked for x in itertools.takewhile(lambda x: not x.of_all_leaves, rounds))
    return Plan(choice, own, len(own) == len(rounds))


def _groups(sizes: Mapping[int, int]) -> list[list[int]]:
    """The leaves, several small ones at a time."""
    groups: list[list[int]] = []
    room = 0
    for i, size in sizes.items():
        if not groups or size > room:
            groups.append([])
            room = MOST_OF_A_GROUP
        groups[-1].append(i)
        room -= size
    return groups


_MEANS = ("mean", "rms")


def _cast(tree: Any, dtype: jnp.dtype) -> Any:
    """Floating point arrays in `dtype`; Python numbers, which adapt by themselves, as they are."""

    def cast(x: Any) -> Any:
        if type(x) in (bool, int, float) or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return jnp.asarray(x, dtype)

    return jax.tree.map(cast, tree)
