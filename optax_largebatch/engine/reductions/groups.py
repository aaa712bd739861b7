"""Which leaves take their passes together, and which numbers go together."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

Item = TypeVar("Item")

MOST_OF_A_PIECE = 32
"""The numbers that one kernel computes. XLA makes a kernel of each of many more."""


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
