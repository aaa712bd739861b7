"""The passes over a leaf, or over a batch of identical leaves side by side."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_largebatch.engine.compilation import barrier
from optax_largebatch.engine.program import LeafArrays, PassInputs, Program, Scalars
from optax_largebatch.engine.requests import Statistic
from optax_largebatch.engine.sums import Sums
from optax_largebatch.norms import explicit_spec


def stored_and_sums(
    program: Program,
    sums: Sums,
    defer_writes: bool,
    leaves: Sequence[LeafArrays],
    scalars: Scalars,
    inputs: PassInputs,
) -> tuple[Sequence[jax.Array], list[jax.Array]]:
    """What is stored before the next round, and what this device adds to its statistics.

    Args:
        program: the program of the leaves.
        sums: takes the sums.
        defer_writes: whether the last pass stores, and not this one.
        leaves: one leaf, or a batch of several.
        scalars: the scalars of the step.
        inputs: the inputs of the pass; for a batch, arrays with an entry for each leaf.
    """
    if len(leaves) == 1:
        return _of_one(program, sums, defer_writes, leaves[0], scalars, inputs)
    structure = jax.tree.structure(leaves[0])
    of_leaves = zip(*map(jax.tree.leaves, leaves), strict=True)
    arrays = [
        x[0] if kind == "whole" else _stacked(x)
        for kind, x in zip(program.kinds, of_leaves, strict=True)
    ]
    axes = [None if kind == "whole" else 0 for kind in program.kinds]

    def sums_of_one(arrays: Any, inputs: PassInputs) -> list[jax.Array]:
        return _of_one(program, sums, True, structure.unflatten(arrays), scalars, inputs)[1]

    return [], jax.vmap(sums_of_one, in_axes=(axes, 0))(arrays, inputs)


def _of_one(
    program: Program,
    sums: Sums,
    defer_writes: bool,
    leaf: LeafArrays,
    scalars: Scalars,
    inputs: PassInputs,
) -> tuple[Sequence[jax.Array], list[jax.Array]]:
    """The same for one leaf."""
    stop = program.run(leaf, scalars, inputs)
    request: Any = stop.request
    stored = [] if defer_writes else stop.stored
    arrays, structure = jax.tree.flatten(leaf)

    def recompute(given: tuple[list[jax.Array], PassInputs]) -> list[Statistic]:
        """The statistics of the round, of the leaf or of a tile of it."""
        of_tile, inputs = iter(given[0]), given[1]
        tile = structure.unflatten(
            x if kind == "whole" else next(of_tile)
            for kind, x in zip(program.kinds, arrays, strict=True)
        )
        request: Any = program.run(tile, scalars, inputs).request
        return list(request.distinct.values())

    of_leaf = [x for kind, x in zip(program.kinds, arrays, strict=True) if kind != "whole"]
    given = of_leaf, inputs._replace(stored=(*inputs.stored, *stored))
    statistics = list(request.distinct.values())
    leaf_sums = sums(statistics, recompute, given, program.tileable)
    infos = program.rounds[len(inputs.answers)].statistics
    return stored, [
        x / info.elements if info.is_mean else x for x, info in zip(leaf_sums, infos, strict=True)
    ]


def hoisted_numbers(
    program: Program, leaves: Sequence[LeafArrays], scalars: Scalars, inputs: PassInputs
) -> Sequence[jax.Array]:
    """The numbers that a program has hoisted so far; those of several leaves are vectors.

    Otherwise XLA compiles the dozen operations for each ratio into the kernels of each leaf. And
    XLA on a GPU would copy a number of the state by a kernel: one pass reads the old number and
    another writes the new one.
    """
    inputs = inputs._replace(hoisted=())
    if len(leaves) == 1:
        return program.run(leaves[0], scalars, inputs).hoisted
    first, structure = jax.tree.flatten(leaves[0])
    positions = [k for k, kind in enumerate(program.kinds) if kind == "per block"]
    arrays = list(map(jax.tree.leaves, leaves))
    of_blocks = [jnp.stack([of_leaf[k] for of_leaf in arrays]) for k in positions]

    def numbers_of_one(answers: Any, of_blocks: Sequence[jax.Array]) -> Sequence[jax.Array]:
        numbers = dict(zip(positions, of_blocks, strict=True))
        leaf = structure.unflatten(numbers.get(k, x) for k, x in enumerate(first))
        return program.run(leaf, scalars, inputs._replace(answers=answers)).hoisted

    return barrier(jax.vmap(numbers_of_one)(inputs.answers, of_blocks))


def inputs_of_each(
    program: Program, inputs: PassInputs, scalars: Scalars, number: int
) -> list[tuple[PassInputs, Scalars]]:
    """The inputs of the last pass and the scalars for each leaf of a batch.

    Their hoisted numbers come from one vector; if there are none, their scalars do. XLA on a GPU
    merges the last passes over leaves that read one vector.
    """
    if number == 1:
        return [(inputs, scalars)]
    answers = [list(map(jnp.unstack, of_round)) for of_round in inputs.answers]
    hoisted = [unstacked(program, k, x) for k, x in enumerate(inputs.hoisted)]
    vectors = None if hoisted else barrier(jax.vmap(lambda _: scalars)(jnp.arange(number)))

    def of_one(i: int) -> tuple[PassInputs, Scalars]:
        its_answers = tuple(tuple(x[i] for x in of_round) for of_round in answers)
        its_inputs = inputs._replace(answers=its_answers, hoisted=tuple(x[i] for x in hoisted))
        return its_inputs, scalars if vectors is None else jax.tree.map(lambda x: x[i], vectors)

    return list(map(of_one, range(number)))


def unstacked(program: Program, position: int, vector: jax.Array) -> Sequence[jax.Array]:
    """`jnp.unstack` of a hoisted number of several leaves, which may be a number of their states.

    XLA makes a kernel of each slice that is written, if it sees that the slices do not overlap. It
    does not see behind a barrier, and makes one kernel of many.
    """
    if position not in program.hoisted_state:
        return jnp.unstack(vector)
    indices = barrier(jnp.arange(len(vector), dtype=jnp.uint32))
    return [jax.lax.dynamic_index_in_dim(vector, index, keepdims=False) for index in indices]


def _stacked(arrays: Sequence[jax.Array]) -> jax.Array:
    """`jnp.stack`, without a reshape of each array: the compiler would look at every one."""
    # Along an axis that is split, to concatenate would move the shards.
    if arrays[0].ndim == 0 or any(explicit_spec(arrays[0])):
        return jnp.stack(arrays)
    return jnp.concatenate(arrays).reshape(len(arrays), *arrays[0].shape)
