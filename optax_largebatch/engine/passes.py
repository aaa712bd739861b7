"""The passes over a leaf, or over a batch of identical leaves side by side."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_largebatch.engine.compilation import barrier
from optax_largebatch.engine.identical_leaves import Batch
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
        return _of_leaf(program, sums, defer_writes, leaves[0], scalars, inputs)
    _, with_arrays = program.arrays_of(leaves[0])
    of_leaves = [program.arrays_of(leaf)[0] for leaf in leaves]
    stacked = list(map(_stacked, zip(*of_leaves, strict=True)))

    def sums_of_leaf(arrays: Any, inputs: PassInputs) -> list[jax.Array]:
        leaf = with_arrays(arrays)
        return _of_leaf(program, sums, True, leaf, scalars, inputs)[1]

    return [], jax.vmap(sums_of_leaf)(stacked, inputs)


def _of_leaf(
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
    arrays, with_arrays = program.arrays_of(leaf)

    def recompute(given: tuple[list[jax.Array], PassInputs]) -> list[Statistic]:
        """The statistics of the round, of the leaf or of a tile of it."""
        arrays, inputs = given
        request: Any = program.run(with_arrays(arrays), scalars, inputs).request
        return list(request.distinct.values())

    given = arrays, inputs._replace(stored=(*inputs.stored, *stored))
    statistics = list(request.distinct.values())
    leaf_sums = sums(statistics, recompute, given, program.tileable)
    for k, info in enumerate(program.rounds[len(inputs.answers)].statistics):
        if info.is_mean:
            leaf_sums[k] = leaf_sums[k] / info.elements
    return stored, leaf_sums


def hoisted_numbers(
    program: Program,
    leaves: Sequence[LeafArrays],
    scalars: Scalars,
    inputs: PassInputs,
) -> Sequence[jax.Array]:
    """The numbers that a program has hoisted so far; those of several leaves are vectors.

    Otherwise XLA compiles the dozen operations for each ratio into the kernels of each leaf. And
    XLA on a GPU would copy a number of the state by a kernel: one pass reads the old number and
    another writes the new one.
    """
    inputs = inputs._replace(hoisted=())
    if len(leaves) == 1:
        return program.run(leaves[0], scalars, inputs).hoisted
    _, with_numbers = program.arrays_of(leaves[0], ["per block"])
    of_leaves = [program.arrays_of(leaf, ["per block"])[0] for leaf in leaves]
    of_blocks = list(map(jnp.stack, zip(*of_leaves, strict=True)))

    def numbers_of_leaf(answers: Any, of_blocks: Any) -> Sequence[jax.Array]:
        leaf = with_numbers(of_blocks)
        return program.run(leaf, scalars, inputs._replace(answers=answers)).hoisted

    return barrier(jax.vmap(numbers_of_leaf)(inputs.answers, of_blocks))


def inputs_of_each(
    batch: Batch,
    scalars: Scalars,
) -> list[tuple[PassInputs, Scalars]]:
    """The inputs of the last pass and the scalars for each leaf of a batch.

    Their hoisted numbers come from one vector; if there are none, their scalars do. XLA on a GPU
    merges the last passes over leaves that read one vector.
    """
    inputs = batch.inputs
    number = len(batch.leaves)
    if number == 1:
        return [(inputs, scalars)]
    hoisted = [unstacked(batch.program, k, x) for k, x in enumerate(inputs.hoisted)]
    vectors = None if hoisted else barrier(jax.vmap(lambda _: scalars)(jnp.arange(number)))
    of_leaves = []
    for i in range(number):
        its_inputs = inputs._replace(
            answers=jax.tree.map(lambda x, i=i: x[i], inputs.answers),
            hoisted=tuple([x[i] for x in hoisted]),
        )
        its_scalars = scalars if vectors is None else jax.tree.map(lambda x, i=i: x[i], vectors)
        of_leaves.append((its_inputs, its_scalars))
    return of_leaves


def unstacked(
    program: Program,
    position: int,
    vector: jax.Array,
) -> Sequence[jax.Array]:
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
