"""A leaf program, run pass by pass over memory.

Arrays that one pass leaves for the next are expensive, because they have to be written and read
back. So a pass leaves only the arrays that the program materializes and the statistics that it asks
for. All else is computed again from these and from the leaf, wherever it is needed. For work on
single elements that is cheaper than memory. Other results, such as products of matrices, are
materialized whether the program says so or not (`costly.py`).
"""

from collections.abc import Sequence
import copy
import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Literal, Var, jaxpr_as_fun
import jax.numpy as jnp
import numpy as np

from optax_largebatch.engine.compilation import barrier
from optax_largebatch.engine.contract.elementwise import check_single_elements
from optax_largebatch.engine.costly import store_what_is_costly
from optax_largebatch.engine.requests import Statistic
from optax_largebatch.engine.scalars import Scalars
from optax_largebatch.engine.tracing import LeafArrays, Round, Splits, traced, variables
from optax_largebatch.engine.transform import LeafTransform


class Progress(NamedTuple):
    """How far the passes over a leaf have come."""

    stored: tuple[jax.Array, ...] = ()
    answers: tuple[tuple[jax.Array, ...], ...] = ()
    """The sums and means of each round that has been taken."""
    worked_on: tuple[jax.Array, ...] = ()
    """The results of work on matrices."""
    ratios: tuple[jax.Array, ...] | None = None
    """The values that follow from the statistics so far alone, if known already."""

    def after(
        self,
        stored: Sequence[jax.Array],
        answers: Sequence[jax.Array] = (),
        worked_on: Sequence[jax.Array] = (),
    ) -> "Progress":
        """The progress one round later."""
        return Progress(
            (*self.stored, *stored), (*self.answers, tuple(answers)), (*self.worked_on, *worked_on)
        )


class Program:
    """The program of a leaf, and of all leaves that are like it.

    Args:
        transform: the transform.
        choice: its choice for the leaf.
        leaf: the arrays of the leaf, or of a part of it.
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
        self.trace = traced(transform, choice, leaf, scalars, splits, dtype_of_all)
        self._retraced = lambda part, scalars: Program(
            transform, choice, part, scalars, splits, dtype_of_all
        )
        self._parts: dict[Any, Program] = {}
        self.writes_late = False
        """Whether the last pass writes all new state, and not the pass that first needs it."""
        self.like_leaf = transform.like_leaf
        self.can_be_cut = transform.given == "parts"
        if self.can_be_cut:
            check_single_elements(self.trace, transform.name)
        else:
            store_what_is_costly(self.trace)

    @functools.cached_property
    def written_late(self) -> "Program":
        """The same program, but two sums of one round do not write the state that they share.

        The last pass computes this state again and writes it.
        """
        if not self._sums_share_state():
            return self
        late = copy.copy(self.without_stores)
        late.writes_late = True
        return late

    @functools.cached_property
    def without_stores(self) -> "Program":
        """The same program, but the last pass computes all arrays again."""
        last = copy.copy(self)
        last.trace = dataclasses.replace(self.trace, stored=[[] for _ in self.trace.stored])
        if not last.can_be_cut:
            store_what_is_costly(last.trace)
        return last

    @property
    def rounds(self) -> tuple[Round, ...]:
        """The requests, round by round."""
        return self.trace.rounds

    def of_part(self, part: LeafArrays, scalars: Scalars) -> "Program":
        """The program for a part of the leaf, made once for parts of one shape."""
        shapes = tuple(jax.typeof(x) for x in jax.tree.leaves(part))
        if shapes not in self._parts:
            self._parts[shapes] = self._retraced(part, scalars)
        return self._parts[shapes]

    def stored(self, leaf: LeafArrays, scalars: Scalars, progress: Progress) -> list[jax.Array]:
        """The arrays that the next pass materializes."""
        targets = self.trace.stored[len(progress.answers)]
        return self._values(targets, leaf, scalars, progress)

    def handed_in(self, leaf: LeafArrays, scalars: Scalars, progress: Progress) -> list[jax.Array]:
        """The arrays that the next round is about."""
        targets = self.trace.handed_in[len(progress.answers)]
        return self._values(targets, leaf, scalars, progress)

    def statistics(self, leaf: LeafArrays, scalars: Scalars, progress: Progress) -> list[Statistic]:
        """The statistics of the next round; `progress` has the arrays stored before it."""
        position = len(progress.answers)
        arrays = self.handed_in(leaf, scalars, progress)
        columns = zip(arrays, self.rounds[position].asked, strict=True)
        return [Statistic(x, own.kind, own.kept) for x, own in columns]

    def with_ratios(self, leaf: LeafArrays, scalars: Scalars, progress: Progress) -> Progress:
        """The progress, with the values that follow from numbers alone.

        Ratios are a few numbers for each leaf. XLA computes them again for each use, each time in
        kernels of their own, unless they are known before the arrays of the leaf are looked at.
        """
        ratios = self._values(self._ratios(progress), leaf, scalars, progress)
        return progress._replace(ratios=tuple(ratios))

    def with_ratios_of_several(
        self, leaves: Sequence[LeafArrays], scalars: Scalars, progress: Progress
    ) -> Progress:
        """The progress of leaves that are alike, with the values that follow from numbers alone.

        They are computed as vectors. The dozen operations for each ratio would otherwise be
        compiled into the kernels of each leaf. For a number of the state XLA on a GPU would take a
        kernel more, to copy it: one pass reads the old number and another writes the new one.

        Args:
            leaves: the leaves.
            scalars: the scalars of the step.
            progress: their progress, with a number for each leaf in the place of each answer.
        """
        positions = list(map(self.trace.jaxpr.invars.index, self.trace.of_blocks))
        first, structure = jax.tree.flatten(leaves[0])
        arrays = list(map(jax.tree.leaves, leaves))
        numbers = [jnp.stack([own[k] for own in arrays]) for k in positions]

        def ratios(answers: Any, numbers: Sequence[jax.Array]) -> Any:
            own = dict(zip(positions, numbers, strict=True))
            leaf = structure.unflatten(own.get(k, x) for k, x in enumerate(first))
            return self.with_ratios(leaf, scalars, progress._replace(answers=answers)).ratios

        return progress._replace(ratios=barrier(jax.vmap(ratios)(progress.answers, numbers)))

    def of_each(self, progress: Progress, several: int) -> list[Progress]:
        """The progress of each leaf, from that of several that are alike."""
        answers, structure = jax.tree.flatten(progress.answers)
        new = {*variables(self.trace.new_of_blocks)}
        ratios = zip(self._ratios(progress), progress.ratios or (), strict=True)
        columns = [
            *map(jnp.unstack, answers),
            *(_written(x) if own in new else jnp.unstack(x) for own, x in ratios),
        ]
        rows = [[column[k] for column in columns] for k in range(several)]
        sums = len(answers)
        return [
            progress._replace(answers=structure.unflatten(row[:sums]), ratios=tuple(row[sums:]))
            for row in rows
        ]

    def result(
        self, leaf: LeafArrays, scalars: Scalars, progress: Progress
    ) -> tuple[jax.Array, Any]:
        """The update and the leaf's new state, which has the dtypes of the old one."""
        targets, structure = jax.tree.flatten(self.trace.result)
        values = self._values(targets, leaf, scalars, progress)
        update, state = structure.unflatten(values)
        return update, jax.tree.map(self._kept, leaf.state, state, is_leaf=lambda x: x is None)

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

    def with_known_numbers(self, old: Any, new: Any) -> Any:
        """The new state with the numbers of blocks that the program knows without any array.

        XLA takes long to put the constants of a thousand leaves into one vector; NumPy does not.
        """
        _, values = self.trace.result

        def known(old: Any, new: Any, value: Any) -> Any:
            return np.asarray(value.val) if old is None and isinstance(value, Literal) else new

        return jax.tree.map(known, old, new, values, is_leaf=lambda x: x is None)

    def _sums_share_state(self) -> bool:
        """Whether two sums of a round are taken of the same array of the old state."""
        trace = self.trace
        return any(
            sum(x in trace.inputs_of(own) for own in statistics) > 1
            for statistics in trace.handed_in
            for x in trace.old_state
        )

    def _values(
        self, targets: Sequence[Any], leaf: LeafArrays, scalars: Scalars, progress: Progress
    ) -> list[Any]:
        """The values of variables, from known values."""
        trace = self.trace
        known = dict(zip(trace.all_stored, progress.stored, strict=False))
        known |= zip(trace.all_answers, (x for own in progress.answers for x in own), strict=False)
        known |= zip(trace.all_worked_on, progress.worked_on, strict=False)
        if progress.ratios is not None:
            known |= zip(self._ratios(progress), progress.ratios, strict=True)
        run = trace.jaxpr.replace(
            eqns=trace.needed(targets, known),
            constvars=[*trace.jaxpr.constvars, *known],
            outvars=list(targets),
        )
        closed = ClosedJaxpr(run, [*trace.consts, *known.values()])
        return jaxpr_as_fun(closed)(*jax.tree.leaves((leaf, scalars)))

    def _ratios(self, progress: Progress) -> list[Var]:
        """The variables that follow from answers and other numbers, as far as they are used."""
        trace = self.trace
        position = len(progress.answers)
        # What was asked for as the sum of terms is an array of the program's own, and no number.
        answers = {
            x
            for own, found in zip(self.rounds, trace.answers[:position], strict=False)
            for asked, x in zip(own.asked, found, strict=True)
            if asked.held != "terms"
        }
        largest = max((x.aval.size for x in answers), default=1)
        known = answers | {*trace.jaxpr.constvars, *trace.same_inputs, *trace.of_blocks}
        follows = {*answers}
        ahead = itertools.chain(*trace.stored[position:], *trace.handed_in[position:])
        results = [*ahead, *jax.tree.leaves(trace.result)]
        used = [*results]
        written = [*itertools.chain(*trace.stored[:position]), *trace.all_worked_on]
        for equation in trace.needed(results, [*written, *trace.all_answers]):
            operands = {*variables(equation.invars)}
            # What is larger, such as a number spread over a leaf, belongs to the leaf's kernels.
            if operands <= known and all(x.aval.size <= largest for x in equation.outvars):
                known |= {*equation.outvars}
                if operands & follows:
                    follows |= {*equation.outvars}
                    continue
            used += equation.invars
        wanted = {*variables(used)} & follows - answers
        return [x for own in trace.jaxpr.eqns for x in own.outvars if x in wanted]


def _written(vector: jax.Array) -> list[jax.Array]:
    """`jnp.unstack`, for numbers that each become an array of the new state.

    XLA makes a kernel of each slice if it sees that the slices have nothing in common. Behind a
    barrier it does not see where they are, and makes one kernel of many.
    """
    places = barrier(jnp.arange(len(vector), dtype=jnp.uint32))
    return [jax.lax.dynamic_index_in_dim(vector, place, keepdims=False) for place in places]
