"""Runs the programs of all leaves, in as few passes over memory as their requests allow.

Before each round of statistics a leaf takes one pass, which stores what the program materializes
and takes the sums. In the end it takes one pass that finishes. Leaves that are split between
devices take each round together, because the sums of all devices travel as one vector. If one
device has all leaves, they go one after the other, small ones in groups.
"""

from collections.abc import Iterable, Mapping, Sequence
import contextlib
import copy
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from optax_largebatch import norms
from optax_largebatch.engine import passes
from optax_largebatch.engine.compilation import (
    allow_inlining,
    barrier,
    chunked,
    no_inline,
    reduction_barrier,
)
from optax_largebatch.engine.execution_plans import ExecutionPlan
from optax_largebatch.engine.identical_leaves import batch_identical, group_leaves
from optax_largebatch.engine.matrices.side_by_side import ELEMENTS_AT_A_TIME, size_of_product
from optax_largebatch.engine.matrices.work import matrices_round
from optax_largebatch.engine.program import LeafArrays, PassInputs, Program, Scalars
from optax_largebatch.engine.requests import Round
from optax_largebatch.engine.sums import is_large


class Execution:
    """The passes over all leaves, traced once for identical ones.

    A batch of identical leaves is known by the number of its first leaf. Most batches have one.

    Args:
        programs: the program of each leaf.
        leaves: the arrays of each.
        scalars: the scalars of the step.
        plan: how the step runs.
    """

    def __init__(
        self,
        programs: Mapping[int, Program],
        leaves: Mapping[int, LeafArrays],
        scalars: Scalars,
        plan: ExecutionPlan,
    ):
        self._programs = programs
        self._leaves = dict(leaves)
        self._scalars = scalars
        self._plan = plan
        self._batches = batch_identical(programs, leaves, plan)
        self.inputs = dict.fromkeys(self._batches, PassInputs())
        """The inputs of the next pass over each batch."""
        self._following: Sequence[int] = ()
        """The batches that wait until the matrices of this group are multiplied."""
        self._results: dict[int, tuple[jax.Array, Any]] = {}
        self._pass = jax.jit(allow_inlining(passes.stored_and_sums), static_argnums=(0, 1, 2))
        self._hoisted = jax.jit(allow_inlining(passes.hoisted_numbers), static_argnums=0)
        self._finish = jax.jit(allow_inlining(Program.result), static_argnums=0)
        self._in_a_call = jax.jit(allow_inlining(self._after_local_rounds), static_argnums=0)

    def results(self) -> dict[int, tuple[jax.Array, Any]]:
        """The results of the programs."""
        while waiting := [i for i in self._batches if self._remaining(i)]:
            # A norm of all leaves has to wait for leaves that have other requests before it.
            local = self._with_local_round(waiting)
            if not local:
                self._take_round(self._with_global_round(waiting))
            previous: Sequence[int] = []
            groups = self._groups(local)
            for group, following in itertools.zip_longest(groups, groups[1:], fillvalue=()):
                if self._plan.serialize_groups:
                    self._wait_for(previous, group)
                    self._following = following
                previous = group
                if self._plan.no_inline:
                    leaves = {k: self._leaves[k] for i in group for k in self._batches[i]}
                    inputs = {i: self.inputs[i] for i in group}
                    with no_inline():
                        self.inputs |= self._in_a_call(tuple(group), leaves, self._scalars, inputs)
                else:
                    self._take_local_rounds(group)
                self._finish_leaves(group)
        self._finish_leaves(self._batches)
        return {i: self._results[i] for i in self._leaves}

    def _groups(self, batches: Sequence[int]) -> list[list[int]]:
        """Groups of batches that take their passes together, in order."""
        sizes = {i: len(self._batches[i]) * self._leaves[i].gradient.size for i in batches}
        if self._plan.smallest_first:
            sizes = dict(sorted(sizes.items(), key=lambda item: item[1]))
        if not self._plan.batch_matrices or self._plan.group_size is None:
            return group_leaves(sizes, self._plan.group_size)
        by_shape: dict[Any, dict[int, int]] = {}
        for i, size in sizes.items():
            on = next((x.of_each for x in self._remaining(i) if x.of_each), None)
            if on is None:
                by_shape.setdefault(None, {})[i] = size
            else:
                alike = on.function, on.dtype, on.matrices.shape
                of_product = size_of_product(self._leaves[i].gradient, on)
                by_shape.setdefault(alike, {})[i] = of_product
        groups: list[list[int]] = []
        for alike, some in by_shape.items():
            groups += group_leaves(some, ELEMENTS_AT_A_TIME if alike else self._plan.group_size)
        return groups

    def _remaining(self, i: int) -> Sequence[Round]:
        """The rounds that a batch has not taken."""
        return self._programs[i].rounds[len(self.inputs[i].answers) :]

    def _with_local_round(self, batches: Iterable[int]) -> list[int]:
        """The batches whose next round is no norm of all leaves."""
        remaining = {i: self._remaining(i) for i in batches}
        return [i for i, rounds in remaining.items() if rounds and rounds[0].global_of is None]

    def _with_global_round(self, waiting: Sequence[int]) -> list[int]:
        """The batches whose norm of all leaves can be taken: no other leaf has yet to come to it.

        A partition has several such norms, each of the leaves of one of its members.
        """
        remaining = {i: self._remaining(i) for i in waiting}
        later = {x.norm for rounds in remaining.values() for x in rounds[1:]}
        return [i for i, rounds in remaining.items() if rounds[0].norm not in later]

    def _after_local_rounds(
        self,
        group: Sequence[int],
        leaves: Mapping[int, LeafArrays],
        scalars: Scalars,
        inputs: Mapping[int, PassInputs],
    ) -> Mapping[int, PassInputs]:
        """The inputs of the last pass, or of the next norm of all leaves, as a function of arrays.

        On a CPU this is a call that XLA does not inline. Otherwise XLA would see that the update
        needs the direction that a norm was taken of, and keep that, of all leaves at once.
        """
        inside = copy.copy(self)
        inside._leaves, inside._scalars, inside.inputs = dict(leaves), scalars, dict(inputs)
        inside._take_local_rounds(group)
        for i in group:
            if not inside._remaining(i):
                inside._hoist_all(i)
        return inside.inputs

    def _take_local_rounds(self, group: Sequence[int]) -> None:
        """Takes all rounds of some batches up to the next norm of all leaves."""
        while ready := self._with_local_round(group):
            self._take_round(ready)

    def _take_round(self, waiting: Sequence[int]) -> None:
        """Takes one round, for which devices or leaves need each other."""
        rounds = {i: self._remaining(i)[0] for i in waiting}
        with_matrices = {i: self._programs[i] for i, x in rounds.items() if x.of_each}
        if with_matrices:
            self._take_round_of_matrices(with_matrices)
            return
        stored: dict[int, Sequence[jax.Array]] = {}
        sums: dict[tuple[int, int], jax.Array] = {}
        for i in waiting:
            static = self._programs[i], self._plan.sums, self._defers_writes(i)
            batch = self._arrays_of(i)
            with self._no_inline(batch[0].gradient.size):
                stored[i], of_batch = self._pass(*static, batch, self._scalars, self.inputs[i])
            sums |= {(i, k): x for k, x in enumerate(of_batch)}
        infos = {(i, k): rounds[i].statistics[k] for i, k in sums}
        totals = norms.over_shards(sums, {key: info.split for key, info in infos.items()})
        if self._plan.fuse_reductions:
            totals = reduction_barrier(totals)
        is_global = rounds[waiting[0]].global_of is not None
        if is_global:
            for path in {rounds[i].global_of for i in waiting}:
                keys = [key for key in totals if rounds[key[0]].global_of == path]
                total = norms.total([jnp.sum(totals[key]) for key in keys])
                totals |= dict.fromkeys(keys, total)
        for key, info in infos.items():
            if info.is_mean:
                totals[key] = totals[key] / norms.devices_along(info.split.within)
        for i in waiting:
            answers = [totals[i, k] for k in range(len(rounds[i].statistics))]
            if is_global and self._is_several(i):
                answers = [jnp.broadcast_to(x, len(self._batches[i])) for x in answers]
            self.inputs[i] = self.inputs[i].after(stored[i], answers)
        self._hoist(waiting, self._plan.batch_hoisted and not is_global)

    def _take_round_of_matrices(self, programs: Mapping[int, Program]) -> None:
        """Takes one round of work on matrices, for which the next leaves wait."""
        following = [k for i in self._following for k in self._batches[i]]
        after, gradients = matrices_round(
            programs,
            self._leaves,
            self._scalars,
            self.inputs,
            {k: self._leaves[k].gradient for k in following},
            self._plan.batch_matrices,
        )
        self.inputs |= after
        self._replace_gradients(gradients)

    def _hoist(self, batches: Sequence[int], as_vectors: bool) -> None:
        """Hoists the numbers of batches, and of other identical leaves."""
        identical: dict[Program, list[int]] = {}
        for i in batches:
            program = self._programs[i]
            is_early = self._plan.serialize_groups and self._remaining(i)
            if self._is_several(i):
                self.inputs[i] = self.inputs[i]._replace(hoisted=())
                self._hoist_all(i)
            elif as_vectors and program.hoists and not is_early:
                identical.setdefault(program, []).append(i)
        for program, leaves in identical.items():
            for chunk in chunked(leaves):
                if len(chunk) > 1:
                    self._hoist_side_by_side(program, chunk)

    def _hoist_side_by_side(self, program: Program, chunk: Sequence[int]) -> None:
        """Hoists the numbers of identical leaves as vectors."""
        inputs = [self.inputs[i] for i in chunk]
        answers = jax.tree.map(lambda *x: jnp.stack(x), *[x.answers for x in inputs])
        leaves = [self._leaves[i] for i in chunk]
        of_all = inputs[0]._replace(answers=answers)
        vectors = self._hoisted(program, leaves, self._scalars, of_all)
        of_vectors = [passes.unstacked(program, k, vector) for k, vector in enumerate(vectors)]
        for k, i in enumerate(chunk):  # there may be none yet, before a later round
            hoisted = tuple([of_leaves[k] for of_leaves in of_vectors])
            self.inputs[i] = self.inputs[i]._replace(hoisted=hoisted)

    def _hoist_all(self, i: int) -> None:
        """Hoists all numbers of a batch, unless they are hoisted already."""
        program, inputs = self._programs[i], self.inputs[i]
        if program.hoists and not inputs.hoisted:
            hoisted = self._hoisted(program, self._arrays_of(i), self._scalars, inputs)
            self.inputs[i] = inputs._replace(hoisted=tuple(hoisted))

    def _finish_leaves(self, batches: Iterable[int]) -> None:
        """Takes the last pass over those leaves that have all their answers."""
        for first in batches:
            if first in self._results or self._remaining(first):
                continue
            self._hoist_all(first)
            program, batch = self._programs[first], self._batches[first]
            of_batch = passes.inputs_of_each(program, self.inputs[first], self._scalars, len(batch))
            for i, (inputs, scalars) in zip(batch, of_batch, strict=True):
                leaf = self._leaves[i]
                if self._computes_several(first) and not self._is_several(first):
                    # Or XLA would see that an earlier pass computes the same, and write it there.
                    waiting = barrier((leaf.gradient, inputs.stored, inputs.answers))
                    leaf = leaf._replace(gradient=waiting[0])
                    inputs = inputs._replace(stored=waiting[1])
                update, state = self._finish(program, leaf, scalars, inputs)
                self._results[i] = update, program.with_constants(state)

    def _wait_for(self, previous: Sequence[int], group: Sequence[int]) -> None:
        """Has the gradients of a group wait for state that the group before it has written.

        Otherwise XLA takes the sums of all leaves first and finishes them later. The scalars wait
        too, so that each group has its own. XLA on a GPU compares kernels that read the same number
        with each other, to find some that it can merge: for a thousand leaves that takes long.
        """
        finished = [i for first in previous for i in self._batches[first] if i in self._results]
        flat = {i: jax.tree.flatten(self._results[i][1]) for i in finished}
        written = {
            (i, k): x
            for i, (arrays, _) in flat.items()
            for k, x in enumerate(arrays)
            if x.shape == self._results[i][0].shape
        }
        gradients = {i: self._leaves[i].gradient for first in group for i in self._batches[first]}
        written, gradients, self._scalars = barrier((written, gradients, self._scalars))
        for i, (arrays, structure) in flat.items():
            arrays = [written.get((i, k), x) for k, x in enumerate(arrays)]
            self._results[i] = self._results[i][0], structure.unflatten(arrays)
        self._replace_gradients(gradients)

    def _replace_gradients(self, gradients: Mapping[int, jax.Array]) -> None:
        """Goes on with gradients that have waited for something."""
        for i, gradient in gradients.items():
            self._leaves[i] = self._leaves[i]._replace(gradient=gradient)

    def _arrays_of(self, i: int) -> list[LeafArrays]:
        """The arrays of each leaf of a batch."""
        return [self._leaves[k] for k in self._batches[i]]

    def _is_several(self, i: int) -> bool:
        """Whether a batch has several leaves."""
        return len(self._batches[i]) > 1

    def _defers_writes(self, i: int) -> bool:
        """Whether the last pass over a batch writes its state, and no pass before it.

        If two sums of a round are computed from the same state, a kernel that takes both one by one
        cannot write over it: it would be copied.
        """
        return self._is_several(i) or (self._plan.defer_state_writes and self._computes_several(i))

    def _computes_several(self, i: int) -> bool:
        """Whether a round takes several sums of what is computed, in passes that XLA inlines."""
        program = self._programs[i]
        return program.tileable and program.computed_at_once > 1 and not self._plan.no_inline

    def _no_inline(self, size: int) -> contextlib.AbstractContextManager[Any]:
        """Surrounds a pass over a leaf: a call that is not inlined if the leaf is large."""
        is_call = self._plan.no_inline and is_large(size)
        return no_inline() if is_call else contextlib.nullcontext()
