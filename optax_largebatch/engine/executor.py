"""Runs the programs of all leaves, in as few passes over memory as their requests allow.

Before each round of statistics a leaf takes one pass, which stores what the program materializes
and takes the sums. In the end it takes one pass that finishes. Leaves that are split between
devices take each round together, because the sums of all devices travel as one vector. If one
device has all leaves, they go one after the other, small ones in groups.
"""

from collections.abc import Mapping, Sequence
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
from optax_largebatch.engine.identical_leaves import (
    Batch,
    batch_identical,
    gradients_of,
    group_leaves,
    replace_gradients,
)
from optax_largebatch.engine.matrices.side_by_side import ELEMENTS_AT_A_TIME, size_of_product
from optax_largebatch.engine.matrices.work import matrices_round
from optax_largebatch.engine.program import (
    LeafArrays,
    PassInputs,
    Program,
    Result,
    Scalars,
    filled,
)
from optax_largebatch.engine.sums import is_large


class Execution:
    """The passes over all leaves, traced once for identical ones.

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
        self.batches = batch_identical(programs, leaves, plan)
        self._scalars = scalars
        self._plan = plan
        self._following: Sequence[Batch] = ()
        """The batches that wait until the matrices of this group are multiplied."""
        self._pass = jax.jit(allow_inlining(passes.stored_and_sums), static_argnums=(0, 1, 2))
        self._hoisted = jax.jit(allow_inlining(passes.hoisted_numbers), static_argnums=0)
        self._finish = jax.jit(allow_inlining(Program.result), static_argnums=0)

    def results(self) -> dict[int, Result]:
        """The results of the programs."""
        while waiting := [batch for batch in self.batches if batch.remaining]:
            # A norm of all leaves has to wait for leaves that have other requests before it.
            local = _with_local_round(waiting)
            if not local:
                self._take_round(_with_global_round(waiting))
            previous: Sequence[Batch] = []
            groups = self._groups(local)
            for group, following in itertools.zip_longest(groups, groups[1:], fillvalue=()):
                if self._plan.serialize_groups:
                    self._wait_for(previous, group)
                    self._following = following
                previous = group
                if self._plan.no_inline:
                    self._take_local_rounds_in_a_call(group)
                else:
                    self._take_local_rounds(group)
                self._finish_leaves(group)
        self._finish_leaves(self.batches)
        return {i: result for batch in self.batches for i, result in batch.results.items()}

    def _groups(self, batches: Sequence[Batch]) -> list[list[Batch]]:
        """Groups of batches that take their passes together, in order."""
        sizes = {x: len(x.leaves) * x.arrays[0].gradient.size for x in batches}
        if self._plan.smallest_first:
            sizes = dict(sorted(sizes.items(), key=lambda item: item[1]))
        if not self._plan.batch_matrices or self._plan.group_size is None:
            return group_leaves(sizes, self._plan.group_size)
        by_shape: dict[Any, dict[Batch, int]] = {}
        for batch, size in sizes.items():
            on = next((x.of_each for x in batch.remaining if x.of_each), None)
            alike = None
            if on is not None:
                alike = on.function, on.dtype, on.matrices.shape
                size = size_of_product(batch.arrays[0].gradient, on)
            by_shape.setdefault(alike, {})[batch] = size
        groups: list[list[Batch]] = []
        for alike, some in by_shape.items():
            groups += group_leaves(some, ELEMENTS_AT_A_TIME if alike else self._plan.group_size)
        return groups

    def _take_local_rounds(self, group: Sequence[Batch]) -> None:
        """Takes all rounds of some batches up to the next norm of all leaves."""
        while ready := _with_local_round(group):
            self._take_round(ready)

    def _take_local_rounds_in_a_call(self, group: Sequence[Batch]) -> None:
        """Takes these rounds in a call that XLA on a CPU does not inline.

        Otherwise XLA would see that the update needs the direction that a norm was taken of, and
        keep that, of all leaves at once.
        """
        in_a_call = jax.jit(allow_inlining(self._after_local_rounds))
        with no_inline():
            after = in_a_call(group, self._scalars)
        for batch, its_inputs in zip(group, after, strict=True):
            batch.inputs = its_inputs

    def _after_local_rounds(
        self,
        group: Sequence[Batch],
        scalars: Scalars,
    ) -> list[PassInputs]:
        """The inputs of the last pass, or of the next norm of all leaves, as a function of arrays.

        What is known before the last pass is hoisted.
        """
        inside = copy.copy(self)
        inside._scalars = scalars
        inside._take_local_rounds(group)
        for batch in group:
            if not batch.remaining:
                inside._hoist_all(batch)
        return [batch.inputs for batch in group]

    def _take_round(self, waiting: Sequence[Batch]) -> None:
        """Takes one round, for which devices or leaves need each other."""
        rounds = [batch.remaining[0] for batch in waiting]
        have_matrices = [its_round.of_each is not None for its_round in rounds]
        if any(have_matrices):
            batches = list(itertools.compress(waiting, have_matrices))
            matrices_round(batches, self._scalars, self._following, self._plan.batch_matrices)
            return
        stored: list[Sequence[jax.Array]] = []
        sums: list[jax.Array] = []
        for batch in waiting:
            static = batch.program, self._plan.sums, self._defers_writes(batch)
            arrays = batch.arrays
            is_call = self._plan.no_inline and is_large(arrays[0].gradient.size)
            with no_inline() if is_call else contextlib.nullcontext():
                of_batch = self._pass(*static, arrays, self._scalars, batch.inputs)
            stored.append(of_batch[0])
            sums += of_batch[1]
        infos = [info for of_batch in rounds for info in of_batch.statistics]
        totals = norms.over_shards(sums, [info.split for info in infos])
        if self._plan.fuse_reductions:
            totals = reduction_barrier(totals)
        is_global = rounds[0].global_of is not None
        if is_global:  # each has one statistic
            totals = _over_all_leaves(totals, [of_batch.global_of for of_batch in rounds])
        for k, info in enumerate(infos):
            if info.is_mean:
                totals[k] = totals[k] / norms.devices_along(info.split.within)
        remaining = iter(totals)
        for batch, its_round, its_stored in zip(waiting, rounds, stored, strict=True):
            answers = [next(remaining) for _ in its_round.statistics]
            if is_global and batch.is_several:
                answers = [jnp.broadcast_to(x, len(batch.leaves)) for x in answers]
            batch.inputs = batch.inputs.after(its_stored, answers)
        self._hoist(waiting, self._plan.batch_hoisted and not is_global)

    def _hoist(self, batches: Sequence[Batch], as_vectors: bool) -> None:
        """Hoists the numbers of batches, and of other identical leaves."""
        identical: dict[Program, list[Batch]] = {}
        for batch in batches:
            is_early = self._plan.serialize_groups and batch.remaining
            if batch.is_several:
                batch.inputs = batch.inputs._replace(hoisted=())
                self._hoist_all(batch)
            elif as_vectors and batch.program.hoists and not is_early:
                identical.setdefault(batch.program, []).append(batch)
        for alike in identical.values():
            for chunk in chunked(alike):
                if len(chunk) > 1:
                    self._hoist_side_by_side(chunk)

    def _hoist_side_by_side(self, chunk: Sequence[Batch]) -> None:
        """Hoists the numbers of identical leaves as vectors."""
        program = chunk[0].program
        answers = [batch.inputs.answers for batch in chunk]
        of_all = chunk[0].inputs._replace(answers=jax.tree.map(lambda *x: jnp.stack(x), *answers))
        leaves = [batch.arrays[0] for batch in chunk]
        vectors = self._hoisted(program, leaves, self._scalars, of_all)
        of_vectors = [passes.unstacked(program, k, vector) for k, vector in enumerate(vectors)]
        for k, batch in enumerate(chunk):  # there may be none yet, before a later round
            hoisted = tuple([of_leaves[k] for of_leaves in of_vectors])
            batch.inputs = batch.inputs._replace(hoisted=hoisted)

    def _hoist_all(self, batch: Batch) -> None:
        """Hoists all numbers of a batch, unless they are hoisted already."""
        program = batch.program
        inputs = batch.inputs
        if program.hoists and not inputs.hoisted:
            hoisted = self._hoisted(program, batch.arrays, self._scalars, inputs)
            batch.inputs = inputs._replace(hoisted=tuple(hoisted))

    def _finish_leaves(self, batches: Sequence[Batch]) -> None:
        """Takes the last pass over those leaves that have all their answers."""
        for batch in batches:
            if batch.results or batch.remaining:
                continue
            self._hoist_all(batch)
            program = batch.program
            computes_several = self._computes_several(program) and not batch.is_several
            of_leaves = passes.inputs_of_each(batch, self._scalars)
            for (i, leaf), (inputs, scalars) in zip(batch.leaves.items(), of_leaves, strict=True):
                if computes_several:
                    # Or XLA would see that an earlier pass computes the same, and write it there.
                    waiting = barrier((leaf.gradient, inputs.stored, inputs.answers))
                    leaf = leaf._replace(gradient=waiting[0])
                    inputs = inputs._replace(stored=waiting[1])
                batch.results[i] = self._finish(program, leaf, scalars, inputs)

    def _wait_for(
        self,
        previous: Sequence[Batch],
        group: Sequence[Batch],
    ) -> None:
        """Has the gradients of a group wait for state that the group before it has written.

        Otherwise XLA takes the sums of all leaves first and finishes them later. The scalars wait
        too, so that each group has its own. XLA on a GPU compares kernels that read the same number
        with each other, to find some that it can merge: for a thousand leaves that takes long.
        """

        def large(update: jax.Array, state: Any) -> Any:
            return jax.tree.map(lambda x: x if x.shape == update.shape else None, state)

        results = [batch.results for batch in previous]
        written = {i: large(*result) for some in results for i, result in some.items()}
        waiting = written, gradients_of(group), self._scalars
        written, gradients, self._scalars = barrier(waiting)
        for some in results:
            for i, (update, state) in some.items():
                some[i] = update, filled(written[i], state)
        replace_gradients(group, gradients)

    def _defers_writes(self, batch: Batch) -> bool:
        """Whether the last pass over a batch writes its state, and no pass before it.

        If two sums of a round are computed from the same state, a kernel that takes both one by one
        cannot write over it: it would be copied.
        """
        defers = self._plan.defer_state_writes and self._computes_several(batch.program)
        return batch.is_several or defers

    def _computes_several(self, program: Program) -> bool:
        """Whether a round takes several sums of what is computed, in passes that XLA inlines."""
        return program.tileable and program.computed_at_once > 1 and not self._plan.no_inline


def _with_local_round(batches: Sequence[Batch]) -> list[Batch]:
    """The batches whose next round is no norm of all leaves."""
    return [x for x in batches if (rounds := x.remaining) and rounds[0].global_of is None]


def _with_global_round(waiting: Sequence[Batch]) -> list[Batch]:
    """The batches whose norm of all leaves can be taken: no other leaf has yet to come to it.

    A partition has several such norms, each of the leaves of one of its members.
    """
    later = {x.norm for batch in waiting for x in batch.remaining[1:]}
    return [batch for batch in waiting if batch.remaining[0].norm not in later]


def _over_all_leaves(
    sums: Sequence[jax.Array],
    paths: Sequence[Any],
) -> list[jax.Array]:
    """For the sum of each leaf that of all leaves with which the same transform works."""
    totals = {}
    for path in dict.fromkeys(paths):
        of_path = [jnp.sum(x) for x, its_path in zip(sums, paths, strict=True) if its_path == path]
        totals[path] = norms.total(of_path)
    return [totals[path] for path in paths]
