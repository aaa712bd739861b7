"""The interface between the engine and the place where a step runs."""

from collections.abc import Mapping, Sequence
import contextlib
from typing import Any, Protocol

import jax

from optax_largebatch.engine.program import Program, Progress
from optax_largebatch.engine.scalars import Scalars
from optax_largebatch.engine.tracing import LeafArrays

SumOfLeaf = tuple[int, int]
"""The number of a leaf, and that of a sum among those of its round."""


class Reductions(Protocol):
    """How sums are taken, and what stands around a pass."""

    may_write_late: bool
    """Whether the last pass over a leaf writes all its new state, where two sums share some."""

    in_turn: bool
    """Whether a group waits until the group before it has written its state."""

    in_step: bool
    """Whether the leaves of a group take each round together, rather than one after the other."""

    ratios_as_vectors: bool
    """Whether ratios of alike leaves are computed after each round that they take in step, as
    vectors."""

    def most_of_a_set(self, leaf: LeafArrays) -> int:
        """How many leaves that are alike take their sums side by side, at most.

        Args:
            leaf: the arrays of one of them.
        """
        ...

    def groups(self, sizes: Mapping[int, int]) -> list[list[int]]:
        """The groups of leaves that go together, in order.

        Args:
            sizes: the elements of each leaf or set of leaves, by number.
        """
        ...

    def sums(
        self, program: Program, leaf: LeafArrays, scalars: Scalars, progress: Progress
    ) -> list[jax.Array]:
        """The sums that this device adds to the statistics of a leaf's next round.

        Args:
            program: the leaf's program.
            leaf: its arrays.
            scalars: the scalars of the step.
            progress: what is known, with what is stored before the round.
        """
        ...

    def apart(self, size: int | None = None) -> contextlib.AbstractContextManager[Any]:
        """Stands around the call of a pass to keep it apart from others.

        Args:
            size: the elements that it passes over; None for a group of leaves.
        """
        ...

    def ready(self, numbers: Mapping[SumOfLeaf, jax.Array]) -> dict[SumOfLeaf, jax.Array]:
        """The sums of many leaves, for those who need them all at one time."""
        ...

    def concatenated(self, vectors: Sequence[jax.Array]) -> jax.Array:
        """One vector of the numbers of many leaves."""
        ...
