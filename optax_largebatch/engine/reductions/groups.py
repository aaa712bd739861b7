"""Which leaves take their passes together, and which numbers go together."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import jax

from optax_largebatch.engine.tracing import LeafArrays

Item = TypeVar("Item")

MOST_OF_A_PIECE = 32
"""The numbers that one kernel computes. XLA makes a kernel of each of many more."""

LARGEST_OF_A_SET = 2**18
"""The elements of a leaf that is put beside others; a pass over more keeps a GPU busy."""

MOST_OF_A_SET = 2**21
"""The elements of small leaves that are side by side. A GPU's cache has four such arrays."""

MOST_OF_A_KERNEL = 90
"""The arrays that one kernel reads and writes; XLA takes no more than 96."""


def in_groups(sizes: Mapping[int, int], most: int) -> list[list[int]]:
    """The leaves in order, several small ones at a time.

    Args:
        sizes: the elements of each leaf, by number.
        most: the elements of a group of several leaves, at most.
    """
    groups: list[list[int]] = []
    room = 0
    for i, size in sizes.items():
        if not groups or size > room:
            groups.append([])
            room = most
        groups[-1].append(i)
        room -= size
    return groups


def in_pieces(items: Sequence[Item]) -> list[Sequence[Item]]:
    """The items in order, in pieces of which one kernel can take all."""
    starts = range(0, len(items), MOST_OF_A_PIECE)
    return [items[start : start + MOST_OF_A_PIECE] for start in starts]


def most_side_by_side(leaf: LeafArrays) -> int:
    """How many leaves like this one a GPU takes side by side: 1 for a large one.

    The kernel of their last pass reads all arrays of a leaf and writes all but the gradient.
    """
    size = leaf.gradient.size
    if size > LARGEST_OF_A_SET:
        return 1
    read = sum(x.shape == leaf.gradient.shape for x in jax.tree.leaves(leaf))
    return max(min(MOST_OF_A_KERNEL // (2 * read - 1), MOST_OF_A_SET // max(size, 1)), 1)
