"""The sums that a device adds up over blocks, taken in the way that suits it.

Each of the three takes the statistics of a round of one leaf, and gives a sum for each.
"""

from collections.abc import Callable, Sequence
import functools
import os
from typing import Any

import jax
import jax.numpy as jnp

from optax_largebatch import norms
from optax_largebatch.engine.compilation import merged_inside, outlined
from optax_largebatch.engine.requests import Statistic
from optax_largebatch.engine.rounds import term
from optax_largebatch.engine.tiles import Tiles

Again = Callable[[Any], list[Statistic]]
"""The statistics once more, from the arrays of the leaf or from a tile of each."""

Sums = Callable[[list[Statistic], Again, Any, bool], list[jax.Array]]
"""Takes the statistics; the same again, and its arrays, those of the leaf first; and whether these
can be cut into tiles."""

LEAST_OF_YNN = 2**12
"""The elements of an array that XLA on a CPU sums by YNN, measured with jaxlib 0.10."""

LEAST_CUT = 2**20
"""The elements of a leaf that is large where a CPU has few cores."""

LEAST_SPLIT = 2**17
"""The elements of a leaf that is large where there are many cores, and middling where there are
few: its sums are taken one by one."""


def plain(statistics: list[Statistic], *_: Any) -> list[jax.Array]:
    """A reduction for each statistic."""
    return [_block_sum(x) for x in statistics]


def at_once(statistics: list[Statistic], *_: Any) -> list[jax.Array]:
    """One reduction for all statistics over the same blocks, for a GPU.

    There XLA writes the new value of an array over the old one only where the kernel takes at most
    one reduction below it. A reduction of several arrays counts as one, and reads what they share
    once. (A CPU would add one element after the other, and a mesh would gather the arrays.)
    """
    alike: dict[Any, list[int]] = {}
    for k, x in enumerate(statistics):
        alike.setdefault((x.array.shape, x.array.dtype, x.kept), []).append(k)
    sums: dict[int, jax.Array] = {}
    for own in alike.values():
        sums |= zip(own, _reduced([statistics[k] for k in own]), strict=True)
    return [sums[k] for k in range(len(statistics))]


def on_cpu(
    statistics: list[Statistic], again: Again, arrays: Any, can_be_cut: bool
) -> list[jax.Array]:
    """Sums that leave little in memory and read it seldom.

    XLA on a CPU sums larger arrays through YNN, which is fast if they are in memory, and takes
    twice as long as a loop of XLA's own if it has to compute them first. So the terms of a small
    leaf are written first, and a large leaf is cut into tiles, each of which is in the cache when
    it is added. Where there are many cores a large leaf is left to YNN, which splits it.
    """
    size = arrays[0][0].size
    if is_large(size):
        tiles = _tiles(statistics, arrays) if can_be_cut and has_few_cores() else None
        if tiles:
            # Traced once for all tiles of a size.
            terms = jax.jit(lambda arrays: [term(x) for x in again(arrays)], inline=True)
            return tiles.sums(terms, arrays)
        return _apart(len(statistics), again, arrays)
    inputs = {id(x) for x in jax.tree.leaves(arrays)}
    computed = [k for k, x in enumerate(statistics) if id(x.array) not in inputs]
    if size < LEAST_OF_YNN or not computed:
        return plain(statistics)
    # Each sum of a middling leaf is a call of its own, so that less is in memory at once.
    middling = size >= LEAST_SPLIT
    pieces = [[k] for k in computed] if middling else [computed]
    sums = {k: _block_sum(x) for k, x in enumerate(statistics) if k not in computed}
    with outlined():
        for piece in pieces:
            take = _of_written(statistics, piece, again)
            sums |= zip(piece, (jax.jit(take) if middling else take)(arrays), strict=True)
    return [sums[k] for k in range(len(statistics))]


def is_large(size: int) -> bool:
    """Whether a leaf of so many elements should pass through a CPU's memory as seldom as can be."""
    return size >= (LEAST_CUT if has_few_cores() else LEAST_SPLIT)


@functools.cache
def has_few_cores() -> bool:
    """Whether XLA gains less from splitting a sum between cores than from a loop on one of them.

    The one question of this library that is about the process and not about the step. A wrong
    answer, where a program is compiled for another machine, costs time on a CPU and nothing else.
    """
    return (os.cpu_count() or 1) <= 2


def _block_sum(statistic: Statistic) -> jax.Array:
    """What a statistic is made from: the sum over each block."""
    return norms.block_sum(term(statistic), statistic.kept or ())


def _reduced(statistics: Sequence[Statistic]) -> list[jax.Array]:
    """The sums over the same blocks of arrays of one shape, in one reduction."""
    kept = statistics[0].kept or ()
    if len(statistics) == 1:
        return [_block_sum(statistics[0])]
    terms = [term(x) for x in statistics]
    shape = norms.shape_of_blocks(terms[0].shape, kept)
    summed = tuple(axis for axis in range(terms[0].ndim) if axis not in kept)
    zeros = [jnp.zeros([], x.dtype) for x in terms]

    def add(left: Sequence[jax.Array], right: Sequence[jax.Array]) -> list[jax.Array]:
        return [x + y for x, y in zip(left, right, strict=True)]

    return [x.reshape(shape) for x in jax.lax.reduce(terms, zeros, add, summed)]


def _tiles(statistics: list[Statistic], arrays: Any) -> Tiles | None:
    """How a leaf can be cut, if it can."""
    shape = arrays[0][0].shape
    if {(x.array.shape, x.kept) for x in statistics} != {(shape, statistics[0].kept)}:
        return None
    tiles = Tiles.of(shape, statistics[0].kept or ())
    return tiles if tiles and all(map(tiles.can_cut, jax.tree.leaves(arrays))) else None


def _of_written(
    asked: Sequence[Statistic], piece: Sequence[int], again: Again
) -> Callable[[Any], list[jax.Array]]:
    """Takes some of the sums, of arrays that are in memory while they are added."""

    def found(arrays: Any) -> list[jax.Array]:
        written = jax.jit(merged_inside(lambda arrays: [again(arrays)[k].array for k in piece]))
        columns = zip(piece, written(arrays), strict=True)
        return [_block_sum(asked[k]._replace(array=x)) for k, x in columns]

    return found


def _apart(number: int, again: Again, arrays: Any) -> list[jax.Array]:
    """The sums without keeping in memory what several of them are computed from."""

    def one(k: int) -> Callable[[Any], jax.Array]:
        return lambda arrays: _block_sum(again(arrays)[k])

    with outlined():
        return [jax.jit(merged_inside(one(k)))(arrays) for k in range(number)]
