"""Which leaves take their passes together, and which numbers go together.

A kernel that passes over one small leaf takes a GPU longer to start than to run, and a thousand of
them take XLA long to compile. XLA puts small leaves that are alike side by side while it reads
them, so nothing is copied. The last pass goes over each leaf by itself; the leaves of a set read
their numbers from one vector, so XLA merges these passes too.
"""

from collections.abc import Mapping, Sequence
import itertools
from typing import Any, TypeVar

import jax

from optax_largebatch.engine.arrays import LeafArrays
from optax_largebatch.engine.places import Place
from optax_largebatch.engine.replay import Program

Item = TypeVar("Item")

MOST_OF_A_PIECE = 32
"""The numbers that one kernel computes. XLA makes a kernel of each of many more."""

LARGEST_OF_A_SET = 2**18
"""The elements of a leaf that is put beside others; a pass over more keeps a GPU busy."""

MOST_OF_A_SET = 2**21
"""The elements of small leaves that are side by side. A GPU's cache has four such arrays."""

MOST_OF_A_KERNEL = 90
"""The arrays that one kernel reads and writes; XLA takes no more than 96."""


def sets_of_alike(
    programs: Mapping[int, Program], leaves: Mapping[int, LeafArrays], place: Place
) -> dict[int, list[int]]:
    """The leaves that take their sums side by side, or alone, by the number of the first.

    Args:
        programs: the program of each leaf, the same one for leaves that are alike.
        leaves: their arrays.
        place: where the step runs.
    """
    alike: dict[Any, list[int]] = {}
    for i, program in programs.items():
        on_elements = program.can_be_cut and not any(x.on_matrices for x in program.rounds)
        alike.setdefault(program if on_elements else i, []).append(i)
    sets = (some for own in alike.values() for some in evenly(own, _most(leaves[own[0]], place)))
    return {own[0]: own for own in sorted(sets)}


def in_groups(sizes: Mapping[int, int], most: int | None) -> list[list[int]]:
    """The leaves in order, several small ones at a time.

    Args:
        sizes: the elements of each leaf, by number.
        most: the elements of a group of several leaves, at most; None for one group of all.
    """
    groups: list[list[int]] = []
    room = 0
    for i, size in sizes.items():
        if not groups or (most is not None and size > room):
            groups.append([])
            room = most or 0
        groups[-1].append(i)
        room -= size
    return groups


def in_pieces(items: Sequence[Item]) -> list[Sequence[Item]]:
    """The items in order, in pieces of which one kernel can take all."""
    starts = range(0, len(items), MOST_OF_A_PIECE)
    return [items[start : start + MOST_OF_A_PIECE] for start in starts]


def evenly(items: Sequence[int], most: int) -> list[list[int]]:
    """The items in order, in pieces of one size if that needs few more than the fewest pieces."""
    fewest = -(-len(items) // most)
    number = next((n for n in range(fewest, fewest * 4 // 3 + 1) if len(items) % n == 0), fewest)
    bounds = [len(items) * k // number for k in range(number + 1)]
    return [list(items[a:b]) for a, b in itertools.pairwise(bounds)]


def _most(leaf: LeafArrays, place: Place) -> int:
    """How many leaves like this one are side by side, at most: 1 for a large one.

    The kernel of their last pass reads all arrays of a leaf and writes all but the gradient.
    """
    size = leaf.gradient.size
    if not place.side_by_side or size > LARGEST_OF_A_SET:
        return 1
    read = sum(x.shape == leaf.gradient.shape for x in jax.tree.leaves(leaf))
    return max(min(MOST_OF_A_KERNEL // (2 * read - 1), MOST_OF_A_SET // max(size, 1)), 1)
