"""Runs the programs of all leaves, in as few passes over memory as their requests allow.

Before each round of statistics a leaf takes one pass, which stores what the program materializes
and takes the sums. In the end it takes one pass that finishes. Leaves that are split between
devices take their rounds in step, because the sums of all devices travel as one vector. Where one
device has all leaves, they go one after the other, small ones in groups.
"""

from collections.abc import Iterable, Mapping, Sequence
import contextlib
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from optax_largebatch import norms
from optax_largebatch.engine.alike import in_groups, in_pieces, sets_of_alike
from optax_largebatch.engine.arrays import Known, LeafArrays, Scalars
from optax_largebatch.engine.compilation import barrier, merged_inside, outlined, together
from optax_largebatch.engine.matrices.round import work_on_matrices
from optax_largebatch.engine.passes import known_of_each, numbers_of, stored_and_sums, unstacked
from optax_largebatch.engine.places import Place
from optax_largebatch.engine.replay import Program
from optax_largebatch.engine.rounds import MEANS, Round
from optax_largebatch.engine.sums import is_large


class Execution:
    """The programs of all leaves on their way; passes are traced once for leaves that are alike.

    Leaves that are side by side are a set, known by the number of its first leaf. Most sets have
    one leaf.
    """

    def __init__(
        self,
        programs: Mapping[int, Program],
        leaves: Mapping[int, LeafArrays],
        scalars: Scalars,
        place: Place,
    ):
        self._programs = programs
        self._leaves = dict(leaves)
        self._scalars = scalars
        self._place = place
        self._sets = sets_of_alike(programs, leaves, place)
        self.known = dict.fromkeys(self._sets, Known())
        """What is known of each set."""
        self._results: dict[int, tuple[jax.Array, Any]] = {}
        self._pass = jax.jit(merged_inside(stored_and_sums), static_argnums=(0, 1, 2))
        self._numbers = jax.jit(merged_inside(numbers_of), static_argnums=0)
        self._finish = jax.jit(merged_inside(Program.result), static_argnums=0)
        self._in_a_call = jax.jit(merged_inside(self._rounds_of), static_argnums=0)

    def results(self) -> dict[int, tuple[jax.Array, Any]]:
        """The results of the programs."""
        while waiting := [i for i in self._sets if self._ahead(i, self.known)]:
            # A norm of all leaves has to wait for leaves that ask for their own before it.
            own = self._asking_for_themselves(waiting, self.known)
            if not own:
                ready = self._all_there(waiting)
                self.known |= self._round(ready, self._leaves, self._scalars, self.known)
            before: list[int] = []
            for group in self._groups(own):
                if self._place.in_turn:
                    self._wait_for(before, group)
                before = group
                leaves = {k: self._leaves[k] for i in group for k in self._sets[i]}
                known = {i: self.known[i] for i in group}
                taken = self._in_a_call if self._place.in_calls else self._rounds_of
                with self._apart():
                    self.known |= taken(tuple(group), leaves, self._scalars, known)
                self._finish_leaves(group)
        self._finish_leaves(self._sets)
        return {i: self._results[i] for i in self._leaves}

    def _groups(self, own: Sequence[int]) -> list[list[int]]:
        """Groups of leaves that take their passes together, in order."""
        sizes = {i: len(self._sets[i]) * self._leaves[i].gradient.size for i in own}
        if self._place.small_first:
            sizes = dict(sorted(sizes.items(), key=lambda item: item[1]))
        return in_groups(sizes, self._place.group)

    def _ahead(self, i: int, known: Mapping[int, Known]) -> Sequence[Round]:
        """The rounds that a leaf has not taken."""
        return self._programs[i].rounds[len(known[i].answers) :]

    def _asking_for_themselves(
        self, indices: Iterable[int], known: Mapping[int, Known]
    ) -> list[int]:
        """The leaves among `indices` whose next round is of their own."""
        ahead = {i: self._ahead(i, known) for i in indices}
        return [i for i, rounds in ahead.items() if rounds and rounds[0].kind != "of all leaves"]

    def _all_there(self, waiting: Sequence[int]) -> list[int]:
        """The leaves whose norm of all leaves can be taken: no other leaf has yet to come to it.

        A partition has several such norms, each of the leaves of one of its parts.
        """
        ahead = {i: self._ahead(i, self.known) for i in waiting}
        later = {(x.asker, x.turn) for rounds in ahead.values() for x in rounds[1:]}
        return [i for i, (x, *_) in ahead.items() if (x.asker, x.turn) not in later]

    def _rounds_of(
        self,
        group: Sequence[int],
        leaves: Mapping[int, LeafArrays],
        scalars: Scalars,
        known: Mapping[int, Known],
    ) -> dict[int, Known]:
        """What is known of some leaves after all rounds that are their own.

        On a CPU this is a call that stays apart from others. Otherwise XLA would see that the
        update needs the direction that a norm was taken of, and keep that, of all leaves at once.
        """
        known = dict(known)
        while ready := self._asking_for_themselves(group, known):
            known |= self._round(ready, leaves, scalars, known)
        if self._place.in_calls:
            for i in (i for i in group if not self._ahead(i, known)):
                known[i] = self._with_numbers(i, leaves, scalars, known[i])
        return known

    def _round(
        self,
        waiting: Sequence[int],
        leaves: Mapping[int, LeafArrays],
        scalars: Scalars,
        known: Mapping[int, Known],
    ) -> dict[int, Known]:
        """What is known of leaves after one round, for which devices or leaves need each other."""
        rounds = {i: self._ahead(i, known)[0] for i in waiting}
        on_matrices = {i: self._programs[i] for i, x in rounds.items() if x.on_matrices}
        if on_matrices:
            return work_on_matrices(on_matrices, leaves, scalars, known)
        is_global = rounds[waiting[0]].kind == "of all leaves"
        stored: dict[int, Sequence[jax.Array]] = {}
        sums: dict[tuple[int, int], jax.Array] = {}
        for i in waiting:
            own = [leaves[k] for k in self._sets[i]]
            with self._apart(own[0].gradient.size):
                passes = self._programs[i], self._place.sums, self._writes_late(i)
                stored[i], found = self._pass(*passes, own, scalars, known[i])
            sums |= {(i, k): x for k, x in enumerate(found)}
        asked = {(i, k): rounds[i].asked[k] for i, k in sums}
        whole = norms.over_shards(sums, {key: x.split for key, x in asked.items()})
        whole = together(whole) if self._place.sums_wait else whole
        if is_global:
            askers = {key: rounds[key[0]].asker for key in whole}
            for asker in set(askers.values()):
                own = [key for key in whole if askers[key] == asker]
                total = norms.total([jnp.sum(whole[key]) for key in own])
                whole |= dict.fromkeys(own, total)
        for key, x in asked.items():
            if x.kind in MEANS:
                whole[key] = whole[key] / norms.devices_along(x.split.within)
        after = {}
        for i in waiting:
            answers = [whole[i, k] for k in range(len(rounds[i].asked))]
            if is_global and self._is_several(i):
                answers = [jnp.broadcast_to(x, len(self._sets[i])) for x in answers]
            after[i] = known[i].after(stored[i], answers)
        vectors = self._place.numbers_as_vectors and not is_global
        return self._with_vectors(leaves, scalars, after, vectors)

    def _with_vectors(
        self,
        leaves: Mapping[int, LeafArrays],
        scalars: Scalars,
        known: dict[int, Known],
        vectors: bool,
    ) -> dict[int, Known]:
        """The same, with the numbers of sets; those of other leaves that are alike as vectors."""
        alike: dict[Program, list[int]] = {}
        for i, own in known.items():
            program = self._programs[i]
            is_early = self._place.in_turn and self._ahead(i, known)
            if self._is_several(i):
                known[i] = self._with_numbers(i, leaves, scalars, own._replace(numbers=()))
            elif vectors and program.asks_for_numbers and not is_early:
                alike.setdefault(program, []).append(i)
        for piece in (piece for own in alike.values() for piece in in_pieces(own)):
            if len(piece) > 1:
                program, first = self._programs[piece[0]], known[piece[0]]
                of_each = [known[i].answers for i in piece]
                of_all = first._replace(answers=jax.tree.map(lambda *x: jnp.stack(x), *of_each))
                found = self._numbers(program, [leaves[i] for i in piece], scalars, of_all)
                columns = [unstacked(program, k, x) for k, x in enumerate(found)]
                for k, i in enumerate(piece):  # there may be none yet, before a later round
                    known[i] = known[i]._replace(numbers=tuple(column[k] for column in columns))
        return known

    def _with_numbers(
        self, i: int, leaves: Mapping[int, LeafArrays], scalars: Scalars, known: Known
    ) -> Known:
        """What is known of a leaf or a set, with all its numbers."""
        if known.numbers or not self._programs[i].asks_for_numbers:
            return known
        found = self._numbers(self._programs[i], [leaves[k] for k in self._sets[i]], scalars, known)
        return known._replace(numbers=tuple(found))

    def _finish_leaves(self, indices: Iterable[int]) -> None:
        """Takes the last pass over those leaves that have all their answers."""
        for first in indices:
            if first in self._results or self._ahead(first, self.known):
                continue
            program, scalars = self._programs[first], self._scalars
            known = self._with_numbers(first, self._leaves, scalars, self.known[first])
            of_each = known_of_each(program, known, scalars, len(self._sets[first]))
            for i, (own, scalars) in zip(self._sets[first], of_each, strict=True):
                leaf = self._leaves[i]
                if self._takes_several(first) and not self._is_several(first):
                    # Or XLA would see that an earlier pass computes the same, and write it there.
                    gradient, stored, _ = barrier((leaf.gradient, own.stored, own.answers))
                    leaf, own = leaf._replace(gradient=gradient), own._replace(stored=stored)
                update, state = self._finish(program, leaf, scalars, own)
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
            i: [x if x.shape == update.shape else None for x in jax.tree.leaves(state)]
            for i, (update, state) in done.items()
        }
        gradients = {i: self._leaves[i].gradient for first in group for i in self._sets[first]}
        written, gradients, self._scalars = barrier((written, gradients, self._scalars))
        for i, (update, state) in done.items():
            old, structure = jax.tree.flatten(state)
            columns = zip(old, written[i], strict=True)
            state = structure.unflatten(x if now is None else now for x, now in columns)
            self._results[i] = update, state
        for i, gradient in gradients.items():
            self._leaves[i] = self._leaves[i]._replace(gradient=gradient)

    def _is_several(self, first: int) -> bool:
        """Whether leaves are side by side with this one."""
        return len(self._sets[first]) > 1

    def _writes_late(self, i: int) -> bool:
        """Whether the last pass over a leaf writes its state, and no pass before it.

        If two sums of a round are computed from the same state, a kernel that takes both one by one
        cannot write over it: it would be copied.
        """
        return self._is_several(i) or (self._place.writes_late and self._takes_several(i))

    def _takes_several(self, i: int) -> bool:
        """Whether a round takes several sums of what is computed, where no calls stay apart."""
        program = self._programs[i]
        return program.can_be_cut and program.computed_at_once > 1 and not self._place.in_calls

    def _apart(self, size: int | None = None) -> contextlib.AbstractContextManager[Any]:
        """Stands around a call that stays apart; a pass over a leaf, only if that is large."""
        apart = self._place.in_calls and (size is None or is_large(size))
        return outlined() if apart else contextlib.nullcontext()
