"""Sums on a CPU that has all of every leaf.

XLA on a CPU sums arrays of a few thousand elements and more through YNN. That is fast if they are
in memory and slow if it has to compute them first: then it takes twice as long as a loop of XLA's
own that writes the array. So a small leaf is computed first, or folded if several sums are asked
of it, and a large one is cut into tiles, each of which is in the cache when it is added. Where
there are many cores, a large leaf is left to YNN, which splits it between them; XLA runs loops and
folds on one.

The thresholds were measured with benchmarks/step_cost.py on two shared x86-64 cores (jaxlib 0.10,
21 November 2026).
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import functools
import os
from typing import Any

import jax
import jax.numpy as jnp

from optax_largebatch import norms
from optax_largebatch.engine.compilation import merged_inside, outlined
from optax_largebatch.engine.program import Program, Progress
from optax_largebatch.engine.reductions.folds import Fold, sums_of_few
from optax_largebatch.engine.reductions.groups import in_groups
from optax_largebatch.engine.reductions.protocol import SumOfLeaf
from optax_largebatch.engine.reductions.tiles import Tiles
from optax_largebatch.engine.requests import Statistic
from optax_largebatch.engine.scalars import Scalars
from optax_largebatch.engine.tracing import LeafArrays, term

MOST_OF_A_GROUP = 2**18
"""The elements of small leaves that are compiled together: as many as are in the caches at once."""

LEAST_OF_YNN = 2**12
"""The elements of an array that YNN sums."""

LEAST_FOLDED = 2**15
"""The elements that would be written otherwise, for which one kernel of a fold is worth it."""

LEAST_CUT = 2**20
"""The elements of a leaf that is large: what is left to add after a fold would be so, too."""

LEAST_SPLIT = 2**17
"""The elements of a leaf that is large where there are many cores."""

Computed = Callable[[Any], list[Statistic]]
"""Gives the statistics of a round, from the arrays of a leaf or from a tile of each."""


@functools.cache
def has_few_cores() -> bool:
    """Whether XLA gains less from splitting a sum between cores than from a loop on one of them.

    The one question of this library that is about the process and not about the step. A wrong
    answer, where a program is compiled for another machine, costs time on a CPU and nothing else.
    """
    return (os.cpu_count() or 1) <= 2


class CpuReductions:
    """Each leaf takes all its rounds by itself, and small ones are compiled in groups."""

    may_write_late = False
    in_turn = False
    in_step = False
    ratios_as_vectors = False

    def most_of_a_set(self, leaf: LeafArrays) -> int:
        """Every leaf by itself, for what is put side by side would be copied."""
        return 1

    def groups(self, sizes: Mapping[int, int]) -> list[list[int]]:
        """The leaves, several small ones at a time."""
        return in_groups(sizes, MOST_OF_A_GROUP)

    def sums(
        self, program: Program, leaf: LeafArrays, scalars: Scalars, progress: Progress
    ) -> list[jax.Array]:
        """The sums, in the way that suits the size of the leaf."""
        flags = jax.tree.leaves(program.like_leaf(leaf.state))
        state, structure = jax.tree.flatten(leaf.state)
        alike = [x for x, flag in zip(state, flags, strict=True) if flag]

        def computed(arrays: Any) -> list[Statistic]:
            """The statistics of the round, of the leaf or of a part of it."""
            gradient, param, alike, progress = arrays
            parts = iter(alike)
            own = [next(parts) if flag else x for x, flag in zip(state, flags, strict=True)]
            part = LeafArrays(gradient, param, structure.unflatten(own))
            whole = gradient.shape == leaf.gradient.shape
            here = program if whole else program.of_part(part, scalars)
            return here.statistics(part, scalars, progress)

        arrays = (leaf.gradient, leaf.param, alike, progress)
        return _sums(computed(arrays), computed, arrays, program.can_be_cut)

    def apart(self, size: int | None = None) -> contextlib.AbstractContextManager[Any]:
        """A group keeps to itself, and in it a leaf that should seldom pass through memory."""
        return outlined() if size is None or is_large(size) else contextlib.nullcontext()

    def ready(self, numbers: Mapping[SumOfLeaf, jax.Array]) -> dict[SumOfLeaf, jax.Array]:
        """The sums as they are: nothing travels between devices."""
        return dict(numbers)

    def concatenated(self, vectors: Sequence[jax.Array]) -> jax.Array:
        """One vector of all, made in one kernel."""
        return jnp.concatenate(list(vectors))


def is_large(size: int) -> bool:
    """Whether a leaf of so many elements should pass through memory as seldom as can be."""
    return size >= (LEAST_CUT if has_few_cores() else LEAST_SPLIT)


def _block_sum(statistic: Statistic) -> jax.Array:
    """What a statistic is made from: the sum over each block."""
    return norms.block_sum(term(statistic), statistic.kept)


def _sums(
    statistics: list[Statistic], computed: Computed, arrays: Any, can_be_cut: bool
) -> list[jax.Array]:
    """The sums for statistics of one leaf.

    Args:
        statistics: `computed(arrays)`.
        computed: what the statistics are taken of.
        arrays: the arrays of the leaf, the gradient first.
        can_be_cut: whether `computed` can be given a tile.

    Returns:
        The sum for each.
    """

    def terms(arrays: Any) -> list[jax.Array]:
        return [term(x) for x in computed(arrays)]

    size = arrays[0].size
    if is_large(size):
        tiles = _tiles(statistics, arrays) if can_be_cut and has_few_cores() else None
        if tiles:
            return tiles.sums(terms, arrays)
        return _apart(len(statistics), computed, arrays)
    if size < LEAST_OF_YNN and _can_be_folded(statistics):
        return sums_of_few(terms(arrays), statistics[0].kept)
    inputs = {id(x) for x in jax.tree.leaves(arrays)}
    late = [k for k, x in enumerate(statistics) if id(x.array) not in inputs]
    if size < LEAST_OF_YNN or not late:
        return [_block_sum(x) for x in statistics]
    if _can_be_folded(statistics):
        fold = Fold.of(statistics[0].array.shape, statistics[0].kept)
        if fold and len(late) * size >= fold.kernels * LEAST_FOLDED:
            return fold.sums(terms, arrays)
    with outlined():
        written = jax.jit(merged_inside(lambda arrays: [computed(arrays)[k].array for k in late]))
        in_memory = dict(zip(late, written(arrays), strict=True))
    return [
        _block_sum(x._replace(array=in_memory.get(k, x.array))) for k, x in enumerate(statistics)
    ]


def _tiles(statistics: list[Statistic], arrays: Any) -> Tiles | None:
    """How a leaf can be cut, if it can."""
    shape = arrays[0].shape
    if not _are_alike(statistics) or statistics[0].array.shape != shape:
        return None
    tiles = Tiles.of(shape, statistics[0].kept)
    return tiles if tiles and all(map(tiles.can_cut, jax.tree.leaves(arrays))) else None


def _can_be_folded(statistics: list[Statistic]) -> bool:
    """Whether it is several sums over contiguous blocks; XLA takes a single one its own way."""
    kept = statistics[0].kept
    return len(statistics) > 1 and _are_alike(statistics) and kept == tuple(range(len(kept)))


def _are_alike(statistics: list[Statistic]) -> bool:
    """Whether they are taken of arrays of one shape over the same blocks."""
    return len({(x.array.shape, x.kept) for x in statistics}) == 1


def _apart(number: int, computed: Computed, arrays: Any) -> list[jax.Array]:
    """The sums without keeping in memory what several of them are computed from."""

    def one(k: int) -> Callable[[Any], jax.Array]:
        return lambda arrays: _block_sum(computed(arrays)[k])

    with outlined():
        return [jax.jit(merged_inside(one(k)))(arrays) for k in range(number)]
