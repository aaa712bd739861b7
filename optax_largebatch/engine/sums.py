"""The sums over blocks that a device takes, in the way that suits it.

Each of the three ways takes the statistics of a round of one leaf, and gives a sum for each.
"""

from collections.abc import Callable
import functools
import operator
import os
from typing import Any

import jax
import jax.numpy as jnp

from optax_largebatch import norms
from optax_largebatch.engine.compilation import allow_inlining, no_inline
from optax_largebatch.engine.requests import Statistic
from optax_largebatch.engine.tiles import Tiles

Recompute = Callable[[Any], list[Statistic]]
"""The statistics once more, from the arrays of the leaf or from a tile of each."""

Sums = Callable[[list[Statistic], Recompute, Any, bool], list[jax.Array]]
"""Takes the statistics; a function that computes them again; its arrays, those of the leaf first;
and whether these may be cut into tiles."""

MIN_YNN_SIZE = 2**12
"""The elements of an array that XLA on a CPU sums by YNN, measured with jaxlib 0.10."""

LARGE = 2**17
"""The elements of a large leaf on a CPU of many cores."""

LARGE_ON_FEW_CORES = 2**20
"""The same on few cores: to cut a smaller leaf into tiles takes as long as to write its terms, and
longer to compile."""


def plain(statistics: list[Statistic], *_: Any) -> list[jax.Array]:
    """A reduction for each statistic."""
    return list(map(_block_sum, statistics))


def variadic(statistics: list[Statistic], *_: Any) -> list[jax.Array]:
    """One reduction for all statistics over the same blocks, for a GPU.

    A kernel of XLA writes a new value over a donated array only if it has one reduction at most. A
    reduction of several arrays counts as one, and reads what they share once. (A CPU would add one
    element after the other, and a mesh would gather the arrays.)
    """
    same_blocks: dict[Any, list[int]] = {}
    for k, x in enumerate(statistics):
        same_blocks.setdefault((x.array.shape, x.array.dtype, x.kept), []).append(k)
    sums: dict[int, jax.Array] = {}
    for positions in same_blocks.values():
        same = _reduced([statistics[k] for k in positions])
        sums |= zip(positions, same, strict=True)
    return [sums[k] for k in sorted(sums)]


def on_cpu(
    statistics: list[Statistic],
    recompute: Recompute,
    arrays: Any,
    tileable: bool,
) -> list[jax.Array]:
    """Sums that need little memory and read it rarely.

    XLA on a CPU sums larger arrays by YNN. That is fast for arrays in memory, but takes twice as
    long as a loop of XLA if they have to be computed first. So the terms of a small leaf are
    written first. A large leaf is cut into tiles, each of which is in the cache when it is added.
    On many cores a large leaf is left to YNN, which splits it between them.
    """
    inputs = {id(x) for x in jax.tree.leaves(arrays)}
    computed = [k for k, x in enumerate(statistics) if id(x.array) not in inputs]
    size = arrays[0][0].size
    if not computed:
        return plain(statistics)
    if is_large(size):
        if tileable and has_few_cores() and (tiles := _tiles(statistics, arrays)):
            # Traced once for all tiles of a size.
            terms = jax.jit(lambda arrays: [x.term for x in recompute(arrays)], inline=True)
            return tiles.sums(terms, arrays)
        return _in_calls(len(statistics), recompute, arrays)
    if size < MIN_YNN_SIZE:
        return plain(statistics)

    def computed_array(k: int, arrays: Any) -> jax.Array:
        return recompute(arrays)[k].array

    write = jax.jit(allow_inlining(computed_array), static_argnums=0)
    statistics = list(statistics)
    with no_inline():
        for k in computed:
            statistics[k] = statistics[k]._replace(array=write(k, arrays))
    return plain(statistics)


def is_large(size: int) -> bool:
    """Whether a leaf of so many elements should be read from a CPU's memory as rarely as it can."""
    return size >= (LARGE_ON_FEW_CORES if has_few_cores() else LARGE)


@functools.cache
def has_few_cores() -> bool:
    """Whether a loop on one core sums faster than XLA does on all cores.

    The one question of this library that is about the process and not about the step. A wrong
    answer, if a program is compiled for another machine, costs time on a CPU and nothing else.
    """
    return (os.cpu_count() or 1) <= 2


def _block_sum(statistic: Statistic) -> jax.Array:
    """The sum over each block that a statistic is made from."""
    return norms.block_sum(statistic.term, statistic.kept or ())


def _reduced(statistics: list[Statistic]) -> list[jax.Array]:
    """The sums over the same blocks of arrays of one shape, in one reduction."""
    if len(statistics) == 1:
        return plain(statistics)
    terms = [x.term for x in statistics]
    kept = statistics[0].kept or ()
    shape = norms.shape_of_blocks(terms[0].shape, kept)
    summed = norms.other_axes(terms[0].ndim, kept)
    zeros = [jnp.zeros([], x.dtype) for x in terms]

    def add(left: Any, right: Any) -> Any:
        return list(map(operator.add, left, right))

    sums = jax.lax.reduce(terms, zeros, add, summed)
    return [x.reshape(shape) for x in sums]


def _tiles(statistics: list[Statistic], arrays: Any) -> Tiles | None:
    """How a leaf can be cut, if it can."""
    kept = statistics[0].kept
    shape = arrays[0][0].shape
    if any((x.array.shape, x.kept) != (shape, kept) for x in statistics):
        return None
    tiles = Tiles.of(shape, kept or ())
    return tiles if tiles and all(map(tiles.can_tile, jax.tree.leaves(arrays))) else None


def _in_calls(
    count: int,
    recompute: Recompute,
    arrays: Any,
) -> list[jax.Array]:
    """The sums, each in a call, so that what several are computed from is not kept in memory."""

    def sum_of(k: int, arrays: Any) -> jax.Array:
        return _block_sum(recompute(arrays)[k])

    one_sum = jax.jit(allow_inlining(sum_of), static_argnums=0)
    with no_inline():
        return [one_sum(k, arrays) for k in range(count)]
