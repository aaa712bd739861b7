"""Sums on one GPU that has all of every leaf.

XLA writes the new value of an array over the old one only where the kernel takes at most one
reduction below it. LANS takes two sums of its second moment, which would cost a copy of it. A
reduction of several arrays at once counts as one, and reads what they share once.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from optax_largebatch import norms
from optax_largebatch.engine.program import Program, Progress
from optax_largebatch.engine.reductions.groups import most_side_by_side
from optax_largebatch.engine.reductions.leaf_by_leaf import LeafByLeaf
from optax_largebatch.engine.requests import Statistic
from optax_largebatch.engine.scalars import Scalars
from optax_largebatch.engine.tracing import LeafArrays, term


class GpuReductions(LeafByLeaf):
    """All sums of a round are one reduction, of several leaves if they are small and alike."""

    def most_of_a_set(self, leaf: LeafArrays) -> int:
        """As many small leaves as one kernel can take."""
        return most_side_by_side(leaf)

    def groups(self, sizes: Mapping[int, int]) -> list[list[int]]:
        """The leaves by size.

        XLA on a GPU runs next what allocates least. The last pass over a leaf writes one array, and
        the first pass over the next leaf may write two; if that leaf is not smaller it comes later.
        """
        by_size = sorted(sizes.items(), key=lambda item: item[1])
        return super().groups(dict(by_size))

    def sums(
        self, program: Program, leaf: LeafArrays, scalars: Scalars, progress: Progress
    ) -> list[jax.Array]:
        """One reduction for all statistics that are taken over the same blocks."""
        statistics = program.statistics(leaf, scalars, progress)
        alike: dict[object, list[int]] = {}
        for k, x in enumerate(statistics):
            alike.setdefault((x.array.shape, x.array.dtype, x.kept), []).append(k)
        sums: dict[int, jax.Array] = {}
        for own in alike.values():
            sums |= zip(own, sums_at_once([statistics[k] for k in own]), strict=True)
        return [sums[k] for k in range(len(statistics))]


def sums_at_once(statistics: Sequence[Statistic]) -> list[jax.Array]:
    """The sums over the same blocks of arrays of one shape, in one reduction."""
    kept = statistics[0].kept
    if len(statistics) == 1:
        return [norms.block_sum(term(statistics[0]), kept)]
    terms = [term(x) for x in statistics]
    shape = norms.shape_of_blocks(terms[0].shape, kept)
    summed = tuple(axis for axis in range(terms[0].ndim) if axis not in kept)
    zeros = [jnp.zeros([], x.dtype) for x in terms]

    def add(left: Sequence[jax.Array], right: Sequence[jax.Array]) -> list[jax.Array]:
        return [x + y for x, y in zip(left, right, strict=True)]

    return [x.reshape(shape) for x in jax.lax.reduce(terms, zeros, add, summed)]
