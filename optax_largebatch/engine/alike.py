"""Sets of small leaves that are alike, which take their sums side by side.

A kernel that passes over one small leaf takes a GPU longer to start than to run, and a thousand of
them take XLA long to compile. XLA puts the leaves of a set side by side while it reads them, so
nothing is copied. The last pass goes over each leaf by itself; the leaves of a set read their
ratios from one vector, so XLA merges these passes too.
"""

from collections.abc import Callable, Mapping, Sequence
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from optax_largebatch.engine.program import Program
from optax_largebatch.engine.tracing import LeafArrays
from optax_largebatch.norms import explicit_spec


def sets_of_alike(
    programs: Mapping[int, Program],
    leaves: Mapping[int, LeafArrays],
    most: Callable[[LeafArrays], int],
) -> dict[int, list[int]]:
    """The leaves that take their sums together, or alone, by the number of the first.

    Args:
        programs: the program of each leaf, the same one for leaves that are alike.
        leaves: their arrays.
        most: the leaves of a set, at most.
    """
    alike: dict[Any, list[int]] = {}
    for i, program in programs.items():
        on_elements = program.can_be_cut and not any(x.on_matrices for x in program.rounds)
        alike.setdefault(program if on_elements else i, []).append(i)
    sets = (some for own in alike.values() for some in evenly(own, most(leaves[own[0]])))
    return {own[0]: own for own in sorted(sets)}


def evenly(items: Sequence[int], most: int) -> list[list[int]]:
    """The items in order, in pieces of one size if that needs few more than the fewest pieces."""
    fewest = -(-len(items) // most)
    number = next((n for n in range(fewest, fewest * 4 // 3 + 1) if len(items) % n == 0), fewest)
    bounds = [len(items) * k // number for k in range(number + 1)]
    return [list(items[a:b]) for a, b in itertools.pairwise(bounds)]


def side_by_side(
    program: Program, leaves: Sequence[LeafArrays]
) -> tuple[list[jax.Array], list[int | None], Any]:
    """The arrays of leaves that are alike, along a new first axis.

    Returns:
        The arrays; for each 0, or None if it is the same for all leaves; and the structure of
        `LeafArrays`.
    """
    first = leaves[0]
    own = [True] * len(jax.tree.leaves((first.gradient, first.param)))
    own += jax.tree.leaves(program.like_leaf(first.state))
    columns = zip(*map(jax.tree.leaves, leaves), strict=True)
    arrays = [_stacked(x) if n else x[0] for n, x in zip(own, columns, strict=True)]
    return arrays, [0 if n else None for n in own], jax.tree.structure(first)


def _stacked(arrays: Sequence[jax.Array]) -> jax.Array:
    """`jnp.stack`, without a reshape of each array: the compiler would look at every one."""
    # Along an axis that is split, to concatenate would move the parts.
    if arrays[0].ndim == 0 or any(explicit_spec(arrays[0])):
        return jnp.stack(arrays)
    return jnp.concatenate(arrays).reshape(len(arrays), *arrays[0].shape)
