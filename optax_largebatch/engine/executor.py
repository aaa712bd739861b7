"""Runs the programs of all leaves, in as few passes over memory as their requests allow.

Before each round of statistics, a leaf takes one pass that stores, if it has anything to store, and
the passes that sum. In the end it takes one pass that finishes. Leaves that are split between
devices take their rounds in step, because the sums of all devices travel as one vector. Where one
device has all leaves, each goes on by itself, or in a group if it is small; on a GPU, small leaves
that are alike take their sums as one array.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_largebatch import norms
from optax_largebatch.engine.alike import sets_of_alike, side_by_side
from optax_largebatch.engine.compilation import barrier, merged_inside
from optax_largebatch.engine.contract.shared import check_shared
from optax_largebatch.engine.matrices.exchange import Work
from optax_largebatch.engine.matrices.work import turns, worked_on
from optax_largebatch.engine.program import Program, Progress
from optax_largebatch.engine.reductions.groups import in_pieces
from optax_largebatch.engine.reductions.protocol import Reductions
from optax_largebatch.engine.scalars import Scalars
from optax_largebatch.engine.tracing import MEANS, LeafArrays, OnMatrices, accumulation_dtype
from optax_largebatch.engine.transform import LeafTransform


class Plan(NamedTuple):
    """The rounds that a leaf takes next by itself."""

    program: Program
    rounds: int
    """The number of rounds."""
    to_the_end: bool
    """Whether no other round follows."""


def programs_of(
    transform: LeafTransform,
    leaves: Mapping[int, LeafArrays],
    scalars: Scalars,
    choices: Sequence[Any],
    split: Callable[[int, tuple[int, ...]], norms.Split],
    specs: Sequence[Any] | None,
    known: dict[Any, Program],
) -> dict[int, Program]:
    """The program of each leaf, the same one for leaves that are alike.

    Args:
        transform: the transform.
        leaves: for each leaf that has a gradient its arrays, by number.
        scalars: the scalars of the step.
        choices: the choice for each leaf, by number.
        split: how a leaf is split between devices, by number and axes that are kept.
        specs: what `split` is taken from for each leaf, if not from the types of the arrays.
        known: programs by the inputs they were traced for; new programs are added.

    Raises:
        TypeError, ValueError: the transform does not keep its promises.
    """
    programs = {}
    of_all = norms.accumulation_dtype(*map(accumulation_dtype, leaves.values()))
    for i, leaf in leaves.items():
        arrays, structure = jax.tree.flatten(leaf)
        spec = None if specs is None else specs[i]
        signature = (choices[i], spec, of_all, structure, *map(jax.typeof, arrays))
        if signature not in known:
            own = functools.partial(split, i)
            known[signature] = Program(transform, choices[i], leaf, scalars, own, of_all)
        programs[i] = known[signature]
    # Of these alone: what is known may have been traced on a mesh of another kind.
    check_shared([x.trace for x in dict.fromkeys(programs.values())])
    return programs


class Execution:
    """The programs of all leaves on their way; passes are traced once for leaves that are alike."""

    def __init__(
        self,
        programs: Mapping[int, Program],
        leaves: Mapping[int, LeafArrays],
        scalars: Scalars,
        reductions: Reductions,
    ):
        late = reductions.may_write_late
        self._programs = {i: x.written_late if late else x for i, x in programs.items()}
        self._leaves = dict(leaves)
        self._scalars = scalars
        self._reductions = reductions
        # From here on a set is known by the number of its first leaf; most have no other.
        self._sets = sets_of_alike(programs, leaves, reductions.most_of_a_set)
        self._programs |= {i: programs[i].without_stores for i in self._sets if self._several(i)}
        self._progress = dict.fromkeys(self._sets, Progress())
        self._results: dict[int, tuple[jax.Array, Any]] = {}
        self._round_of_leaf = jax.jit(merged_inside(self._stored_and_sums), static_argnums=0)
        self._matrices_of_leaf = jax.jit(merged_inside(_stored_and_matrices), static_argnums=0)
        self._sums_of_set = jax.jit(merged_inside(self._sums_side_by_side), static_argnums=0)
        self._rounds_of_leaf = jax.jit(merged_inside(self._by_itself), static_argnums=0)
        self._rounds_of_group = jax.jit(merged_inside(self._group_by_itself), static_argnums=0)
        self._ratios_of_several = jax.jit(
            merged_inside(Program.with_ratios_of_several), static_argnums=0
        )
        self._with_ratios = jax.jit(merged_inside(Program.with_ratios), static_argnums=0)
        self._finish = jax.jit(merged_inside(Program.result), static_argnums=0)

    def results(self) -> dict[int, tuple[jax.Array, Any]]:
        """The results of the programs."""
        while waiting := [i for i in self._sets if self._ahead(i)]:
            # A norm of all leaves has to wait for leaves that ask for their own before it.
            own = self._asking_for_themselves(waiting)
            if not own:
                self._take_round_in_step(waiting, of_all_leaves=True)
            before: list[int] = []
            sizes = {i: len(self._sets[i]) * self._leaves[i].gradient.size for i in own}
            for group in self._reductions.groups(sizes):
                if self._reductions.in_turn:
                    self._wait_for(before, group)
                before = group
                if self._reductions.in_step:
                    while ready := self._asking_for_themselves(group):
                        self._take_round_in_step(ready, of_all_leaves=False)
                else:
                    self._take_rounds_of_group(group)
                self._finish_leaves(group)
        self._finish_leaves(self._sets)
        return {i: self._results[i] for i in self._leaves}

    def _asking_for_themselves(self, indices: Iterable[int]) -> list[int]:
        """The leaves among `indices` whose next round is of their own."""
        return [i for i in indices if self._ahead(i) and not self._ahead(i)[0].of_all_leaves]

    def _several(self, first: int) -> int:
        """The number of leaves of a set; 0 for a leaf by itself."""
        return len(self._sets[first]) if len(self._sets[first]) > 1 else 0

    def _finish_leaves(self, indices: Iterable[int]) -> None:
        """Takes the last pass over those leaves that have all their answers."""
        for first in indices:
            if first in self._results or self._ahead(first):
                continue
            program, progress = self._programs[first], self._progress[first]
            if progress.ratios is None:
                leaf = self._leaves[first]
                progress = self._with_ratios(program, leaf, self._scalars, progress)
            several = self._several(first)
            of_each = program.of_each(progress, several) if several else [progress]
            for i, own in zip(self._sets[first], of_each, strict=True):
                leaf = self._leaves[i]
                if program.writes_late:
                    # Or XLA would see that an earlier pass computes the same, and write it there.
                    gradient, _ = barrier((leaf.gradient, own.answers))
                    leaf = leaf._replace(gradient=gradient)
                update, state = self._finish(program, leaf, self._scalars, own)
                self._results[i] = update, program.with_known_numbers(leaf.state, state)

    def _wait_for(self, before: list[int], group: list[int]) -> None:
        """Has the gradients of a group wait for state that the group before it has written.

        Otherwise XLA takes the sums of all leaves first and finishes them later. The scalars wait
        too, so that each group has its own. XLA on a GPU compares kernels that read the same number
        with each other, to find some that it can merge: for a thousand leaves that takes long.
        """
        of_sets = itertools.chain.from_iterable(self._sets[first] for first in before)
        done = {i: self._results[i] for i in of_sets if i in self._results}
        written = {
            i: [x for x in jax.tree.leaves(state) if x.shape == update.shape]
            for i, (update, state) in done.items()
        }
        gradients = {i: self._leaves[i].gradient for first in group for i in self._sets[first]}
        written, gradients, self._scalars = barrier((written, gradients, self._scalars))
        for i, (update, state) in done.items():
            self._results[i] = update, _replaced(state, update.shape, written[i])
        for i, gradient in gradients.items():
            self._leaves[i] = self._leaves[i]._replace(gradient=gradient)

    def _ahead(self, i: int) -> Sequence[Any]:
        """The rounds that a leaf has not taken."""
        return self._programs[i].rounds[len(self._progress[i].answers) :]

    def _take_rounds_of_group(self, group: list[int]) -> None:
        """Takes leaves through all rounds up to one of all leaves, each by itself.

        The groups stay apart, or XLA would see that the update needs the direction that a norm was
        taken of, and keep that direction, of all leaves at once, in memory. Inside a group it may:
        what is kept is small, and the other cores have the other leaves of the group to do.
        """
        plans = []
        for i in group:
            ahead = self._ahead(i)
            rounds = len(list(itertools.takewhile(lambda x: not x.of_all_leaves, ahead)))
            plans.append(Plan(self._programs[i], rounds, rounds == len(ahead)))
        leaves = [self._leaves[i] for i in group]
        so_far = [self._progress[i] for i in group]
        with self._reductions.apart():
            after = self._rounds_of_group(tuple(plans), leaves, self._scalars, so_far)
        self._progress |= zip(group, after, strict=True)

    def _take_round_in_step(self, waiting: list[int], of_all_leaves: bool) -> None:
        """Takes leaves through one round, for which devices or leaves need each other."""
        on_matrices = {i: x for i in waiting if (x := self._ahead(i)[0].on_matrices)}
        if on_matrices:
            self._work_on_matrices(on_matrices)
            return
        stored: dict[int, list[jax.Array]] = {}
        sums: dict[tuple[int, int], jax.Array] = {}
        for i in waiting:
            program, progress = self._programs[i], self._progress[i]
            if self._several(i):
                leaves = [self._leaves[k] for k in self._sets[i]]
                stored[i], own = [], self._sums_of_set(program, leaves, self._scalars, progress)
            else:
                with self._reductions.apart():
                    leaf = self._leaves[i]
                    stored[i], own = self._round_of_leaf(program, leaf, self._scalars, progress)
            sums |= {(i, k): x for k, x in enumerate(own)}
        asked = {(i, k): self._ahead(i)[0].asked[k] for i, k in sums}
        splits = {key: x.split for key, x in asked.items()}
        whole = self._reductions.ready(norms.over_shards(sums, splits))
        if of_all_leaves:
            whole = dict.fromkeys(whole, norms.total(list(whole.values())))
        for key, x in asked.items():
            if x.kind in MEANS:
                whole[key] = whole[key] / norms.devices_along(x.split.within)
        for i in waiting:
            answers = [whole[i, k] for k in range(len(self._ahead(i)[0].asked))]
            if several := self._several(i):
                of_set = [jnp.broadcast_to(x, (several,)) if of_all_leaves else x for x in answers]
                progress = self._progress[i].after([], of_set)
                leaves = [self._leaves[k] for k in self._sets[i]]
                own = self._programs[i], leaves, self._scalars, progress
                self._progress[i] = self._ratios_of_several(*own)
            else:
                self._progress[i] = self._progress[i].after(stored[i], answers)
        if self._reductions.ratios_as_vectors and not of_all_leaves:
            self._find_ratios([i for i in waiting if not self._several(i)])

    def _find_ratios(self, indices: Iterable[int]) -> None:
        """Finds what follows from the answers so far, of leaves that are alike at once."""
        alike: dict[Program, list[int]] = {}
        for i in indices:
            alike.setdefault(self._programs[i], []).append(i)
        for program, leaves in alike.items():
            for piece in in_pieces(leaves):
                if len(piece) > 1:
                    answers = [self._progress[i].answers for i in piece]
                    vectors = jax.tree.map(lambda *x: jnp.stack(x), *answers)
                    of_all = self._progress[piece[0]]._replace(answers=vectors)
                    leaves = [self._leaves[i] for i in piece]
                    found = self._ratios_of_several(program, leaves, self._scalars, of_all)
                    of_each = program.of_each(found, len(piece))
                    for i, own in zip(piece, of_each, strict=True):
                        self._progress[i] = self._progress[i]._replace(ratios=own.ratios)

    def _sums_side_by_side(
        self, program: Program, leaves: list[LeafArrays], scalars: Scalars, progress: Progress
    ) -> list[jax.Array]:
        """What this device adds to the statistics of a set, with a number for each leaf."""

        def sums(arrays: Sequence[jax.Array], progress: Progress) -> list[jax.Array]:
            leaf = structure.unflatten(arrays)
            return self._stored_and_sums(program, leaf, scalars, progress)[1]

        arrays, axes, structure = side_by_side(program, leaves)
        found = jax.vmap(sums, in_axes=(axes, 0))(arrays, progress)
        of_all_leaves = program.rounds[len(progress.answers)].of_all_leaves
        return [jnp.sum(x, axis=0) for x in found] if of_all_leaves else found

    def _work_on_matrices(self, waiting: Mapping[int, OnMatrices]) -> None:
        """Takes leaves through a round of work on their matrices, those of one shape at a time."""
        alike = turns({i: Work(self._leaves[i].gradient, (), on) for i, on in waiting.items()})
        for now, following in itertools.zip_longest(alike, alike[1:], fillvalue=[]):
            stored: dict[int, list[jax.Array]] = {}
            asked: dict[int, Work] = {}
            for i in now:
                stored[i], array, numbers = self._matrices_of_leaf(
                    self._programs[i], self._leaves[i], self._scalars, self._progress[i]
                )
                asked[i] = Work(array, numbers, waiting[i])
            gradients = {i: self._leaves[i].gradient for i in following}
            done, gradients = worked_on(asked, gradients)
            for i, x in done.items():
                self._progress[i] = self._progress[i].after(stored[i], worked_on=[x])
            for i, gradient in gradients.items():
                self._leaves[i] = self._leaves[i]._replace(gradient=gradient)

    def _group_by_itself(
        self,
        plans: tuple[Plan, ...],
        leaves: list[LeafArrays],
        scalars: Scalars,
        progress: list[Progress],
    ) -> list[Progress]:
        """The progress of the leaves of a group."""
        columns = zip(plans, leaves, progress, strict=True)
        return [self._rounds_of_leaf(plan, leaf, scalars, own) for plan, leaf, own in columns]

    def _by_itself(
        self, plan: Plan, leaf: LeafArrays, scalars: Scalars, progress: Progress
    ) -> Progress:
        """The progress of one leaf of a group."""
        for one in plan.program.rounds[len(progress.answers) :][: plan.rounds]:
            with self._reductions.apart(leaf.gradient.size):
                if one.on_matrices:
                    own = self._matrices_of_leaf(plan.program, leaf, scalars, progress)
                    stored, array, numbers = own
                    done, _ = worked_on({0: Work(array, numbers, one.on_matrices)})
                    progress = progress.after(stored, worked_on=[done[0]])
                else:
                    taken = self._round_of_leaf(plan.program, leaf, scalars, progress)
                    progress = progress.after(*taken)
        return plan.program.with_ratios(leaf, scalars, progress) if plan.to_the_end else progress

    def _stored_and_sums(
        self, program: Program, leaf: LeafArrays, scalars: Scalars, progress: Progress
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """What is stored before the next round, and what this device adds to its statistics."""
        stored = program.stored(leaf, scalars, progress)
        so_far = progress._replace(stored=(*progress.stored, *stored))
        sums = self._reductions.sums(program, leaf, scalars, so_far)
        asked = program.rounds[len(progress.answers)].asked
        return stored, [
            x / own.elements if own.kind in MEANS else x for x, own in zip(sums, asked, strict=True)
        ]


def _stored_and_matrices(
    program: Program, leaf: LeafArrays, scalars: Scalars, progress: Progress
) -> tuple[list[jax.Array], jax.Array, list[jax.Array]]:
    """What is stored before the next round, the array whose matrices it works on, and numbers."""
    stored = program.stored(leaf, scalars, progress)
    so_far = progress._replace(stored=(*progress.stored, *stored))
    array, *numbers = program.handed_in(leaf, scalars, so_far)
    return stored, array, numbers


def _replaced(state: Any, shape: tuple[int, ...], arrays: Iterable[jax.Array]) -> Any:
    """A state with new arrays in the place of its arrays of a shape."""
    others = iter(arrays)
    return jax.tree.map(lambda x: next(others) if x.shape == shape else x, state)
