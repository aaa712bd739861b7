"""Sums as XLA takes them: on accelerators, and wherever several devices have parts of a leaf."""

from collections.abc import Mapping, Sequence
import contextlib
from typing import Any

import jax
import jax.numpy as jnp

from optax_largebatch import norms
from optax_largebatch.engine.compilation import barrier, together
from optax_largebatch.engine.program import Program, Progress
from optax_largebatch.engine.reductions.groups import in_pieces
from optax_largebatch.engine.reductions.protocol import SumOfLeaf
from optax_largebatch.engine.scalars import Scalars
from optax_largebatch.engine.tracing import LeafArrays, term


class XlaReductions:
    """All leaves take their rounds in step, and nothing is kept from the compiler.

    On a GPU a kernel writes over an array that it reads only if it takes at most one sum of it.
    LANS takes two sums of its second moment in one round: written in that pass, the moment would
    take a second array and a copy. So the last pass writes it, which costs no byte more.
    """

    may_write_late = True
    in_turn = False
    in_step = True
    ratios_as_vectors = True

    def most_of_a_set(self, leaf: LeafArrays) -> int:
        """Every leaf by itself: to put several side by side costs a TPU more bytes."""
        return 1

    def groups(self, sizes: Mapping[int, int]) -> list[list[int]]:
        """One group of all leaves."""
        return [list(sizes)] if sizes else []

    def sums(
        self, program: Program, leaf: LeafArrays, scalars: Scalars, progress: Progress
    ) -> list[jax.Array]:
        """One reduction for each statistic."""
        statistics = program.statistics(leaf, scalars, progress)
        return [norms.block_sum(term(x), x.kept) for x in statistics]

    def apart(self, size: int | None = None) -> contextlib.AbstractContextManager[Any]:
        """Passes stay open to the compiler, which has to see all leaves to combine their sums."""
        return contextlib.nullcontext()

    def ready(self, numbers: Mapping[SumOfLeaf, jax.Array]) -> dict[SumOfLeaf, jax.Array]:
        """All of them together, so that they travel as one."""
        return together(numbers)

    def concatenated(self, vectors: Sequence[jax.Array]) -> jax.Array:
        """One vector of all, made in pieces: XLA would take a kernel for each of many numbers."""
        pieces = [jnp.concatenate(piece) for piece in in_pieces(list(vectors))]
        # Or the kernel of the last concatenation would compute all numbers once more.
        return jnp.concatenate(barrier(pieces))
