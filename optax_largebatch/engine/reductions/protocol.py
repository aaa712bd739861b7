"""What the engine asks of the place where a step runs."""

from collections.abc import Mapping
import contextlib
from typing import Any, Protocol

import jax

from optax_largebatch.engine.compilation import Key
from optax_largebatch.engine.program import Program, Progress
from optax_largebatch.engine.scalars import Scalars
from optax_largebatch.engine.tracing import LeafArrays


class Reductions(Protocol):
    """How sums are taken, and what stands around a pass."""

    def groups(self, sizes: Mapping[int, int]) -> list[list[int]] | None:
        """Which leaves take their rounds together, each by itself; None if all do, in step.

        Args:
            sizes: the elements of each leaf, by number.
        """
        ...

    def sums(
        self, program: Program, leaf: LeafArrays, scalars: Scalars, progress: Progress
    ) -> list[jax.Array]:
        """What this device adds to the statistics of a leaf's next round.

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

    def ready(self, numbers: Mapping[Key, jax.Array]) -> dict[Key, jax.Array]:
        """The numbers of many leaves, for those who need them all at one time."""
        ...
