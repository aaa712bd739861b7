"""The passes over a leaf, or over leaves that are alike side by side."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_largebatch.engine.arrays import Known, LeafArrays, Scalars
from optax_largebatch.engine.compilation import barrier
from optax_largebatch.engine.replay import Program
from optax_largebatch.engine.requests import Statistic
from optax_largebatch.engine.rounds import MEANS, distinct
from optax_largebatch.engine.state import ArrayKind
from optax_largebatch.engine.sums import Sums
from optax_largebatch.norms import explicit_spec


def stored_and_sums(
    program: Program,
    sums: Sums,
    late: bool,
    leaves: Sequence[LeafArrays],
    scalars: Scalars,
    known: Known,
) -> tuple[Sequence[jax.Array], list[jax.Array]]:
    """What is stored before the next round, and what this device adds to its statistics.

    Args:
        program: the program of the leaves.
        sums: takes the sums.
        late: whether the last pass stores, and not this one.
        leaves: one leaf, or several that are alike.
        scalars: the scalars of the step.
        known: what is known of the leaf, with a number for each of several.
    """
    if len(leaves) == 1:
        return _of_one(program, sums, late, leaves[0], scalars, known)
    structure, flags = jax.tree.structure(leaves[0]), differs_by_leaf(program, leaves[0])
    columns = zip(*map(jax.tree.leaves, leaves), strict=True)
    arrays = [_stacked(x) if own else x[0] for own, x in zip(flags, columns, strict=True)]

    def own(arrays: Any, known: Known) -> list[jax.Array]:
        leaf = structure.unflatten(arrays)
        return _of_one(program, sums, True, leaf, scalars, known)[1]

    return [], jax.vmap(own, in_axes=([0 if x else None for x in flags], 0))(arrays, known)


def _of_one(
    program: Program, sums: Sums, late: bool, leaf: LeafArrays, scalars: Scalars, known: Known
) -> tuple[Sequence[jax.Array], list[jax.Array]]:
    """The same for one leaf."""
    stop = program.run(leaf, scalars, known)
    request: Any = stop.request
    stored = [] if late else stop.stored
    everything, structure = jax.tree.flatten(leaf)
    flags = differs_by_leaf(program, leaf)

    def again(arrays: Any) -> list[Statistic]:
        """The statistics of the round, of the leaf or of a part of it."""
        parts, known = iter(arrays[0]), arrays[1]
        own = [next(parts) if flag else x for x, flag in zip(everything, flags, strict=True)]
        request: Any = program.run(structure.unflatten(own), scalars, known).request
        return distinct(request)

    alike = [x for x, flag in zip(everything, flags, strict=True) if flag]
    arrays = alike, known._replace(stored=(*known.stored, *stored))
    found = sums(distinct(request), again, arrays, program.can_be_cut)
    asked = program.rounds[len(known.answers)].asked
    return stored, [
        x / own.elements if own.kind in MEANS else x for x, own in zip(found, asked, strict=True)
    ]


def numbers_of(
    program: Program, leaves: Sequence[LeafArrays], scalars: Scalars, known: Known
) -> Sequence[jax.Array]:
    """The numbers that a program has asked for so far, of several leaves as vectors.

    The dozen operations for each ratio would otherwise be compiled into the kernels of each leaf.
    For a number of the state XLA on a GPU would take a kernel more, to copy it: one pass reads the
    old number and another writes the new one.
    """
    known = known._replace(numbers=())
    if len(leaves) == 1:
        return program.run(leaves[0], scalars, known).numbers
    first, structure = jax.tree.flatten(leaves[0])
    positions = [k for k, kind in enumerate(kinds(program, leaves[0])) if kind == "per block"]
    arrays = list(map(jax.tree.leaves, leaves))
    of_blocks = [jnp.stack([own[k] for own in arrays]) for k in positions]

    def own(answers: Any, of_blocks: Sequence[jax.Array]) -> Sequence[jax.Array]:
        numbers = dict(zip(positions, of_blocks, strict=True))
        leaf = structure.unflatten(numbers.get(k, x) for k, x in enumerate(first))
        return program.run(leaf, scalars, known._replace(answers=answers)).numbers

    return barrier(jax.vmap(own)(known.answers, of_blocks))


def known_of_each(
    program: Program, known: Known, scalars: Scalars, several: int
) -> list[tuple[Known, Scalars]]:
    """What is known of each leaf, and the scalars, from what is known of some that are alike.

    Their numbers come from one vector, or the scalars if there are no numbers: XLA on a GPU merges
    the last passes over leaves that read one vector.
    """
    if several == 1:
        return [(known, scalars)]
    answers = [list(map(jnp.unstack, own)) for own in known.answers]
    numbers = [unstacked(program, k, x) for k, x in enumerate(known.numbers)]
    vectors = None if numbers else barrier(jax.vmap(lambda _: scalars)(jnp.arange(several)))

    def own(i: int) -> tuple[Known, Scalars]:
        each = tuple(tuple(column[i] for column in own) for own in answers)
        found = known._replace(answers=each, numbers=tuple(column[i] for column in numbers))
        return found, scalars if vectors is None else jax.tree.map(lambda x: x[i], vectors)

    return list(map(own, range(several)))


def unstacked(program: Program, position: int, vector: jax.Array) -> Sequence[jax.Array]:
    """`jnp.unstack` of a number of several leaves, which may be a new number of their states.

    XLA makes a kernel of each slice that is written, if it sees that the slices have nothing in
    common. Behind a barrier it does not see where they are, and makes one kernel of many.
    """
    if position not in program.new_numbers:
        return jnp.unstack(vector)
    places = barrier(jnp.arange(len(vector), dtype=jnp.uint32))
    return [jax.lax.dynamic_index_in_dim(vector, place, keepdims=False) for place in places]


def kinds(program: Program, leaf: LeafArrays) -> list[ArrayKind]:
    """What each array of a leaf has numbers for."""
    own: list[ArrayKind] = ["per element"] * len(jax.tree.leaves((leaf.gradient, leaf.param)))
    return [*own, *jax.tree.leaves(program.kinds(leaf.state))]


def differs_by_leaf(program: Program, leaf: LeafArrays) -> list[bool]:
    """For each array of a leaf whether leaves that are alike have each their own."""
    return [kind != "whole" for kind in kinds(program, leaf)]


def _stacked(arrays: Sequence[jax.Array]) -> jax.Array:
    """`jnp.stack`, without a reshape of each array: the compiler would look at every one."""
    # Along an axis that is split, to concatenate would move the parts.
    if arrays[0].ndim == 0 or any(explicit_spec(arrays[0])):
        return jnp.stack(arrays)
    return jnp.concatenate(arrays).reshape(len(arrays), *arrays[0].shape)
