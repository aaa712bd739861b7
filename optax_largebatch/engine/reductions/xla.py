"""Sums as XLA takes them: on accelerators, and wherever several devices have parts of a leaf."""

from collections.abc import Mapping
import contextlib
from typing import Any

import jax

from optax_largebatch import norms
from optax_largebatch.engine.compilation import Key, together
from optax_largebatch.engine.program import Program, Progress
from optax_largebatch.engine.scalars import Scalars
from optax_largebatch.engine.tracing import LeafArrays, term


class XlaReductions:
    """All leaves take their rounds in step, and nothing is kept from the compiler."""

    def groups(self, sizes: Mapping[int, int]) -> None:
        """No leaf goes on by itself."""

    def sums(
        self, program: Program, leaf: LeafArrays, scalars: Scalars, progress: Progress
    ) -> list[jax.Array]:
        """One reduction for each statistic."""
        statistics = program.statistics(leaf, scalars, progress)
        return [norms.block_sum(term(x), x.kept) for x in statistics]

    def apart(self, size: int | None = None) -> contextlib.AbstractContextManager[Any]:
        """Passes stay open to the compiler, which has to see all leaves to combine their sums."""
        return contextlib.nullcontext()

    def ready(self, numbers: Mapping[Key, jax.Array]) -> dict[Key, jax.Array]:
        """All of them together, so that they travel as one."""
        return together(numbers)
