"""Sums over tiles of an array: each tile is added, element by element, to the sums so far.

The sums are an array of the size of a tile, and stay in the cache like what is computed of a tile.
An iteration of the loop adds several tiles at once, so that the sums are read and written once for
all of them. XLA on a CPU makes a kernel for each array that an iteration returns. So two sums share
one as the two parts of a complex number, and share what they read and compute. XLA splits a kernel
between cores if it moves more than half a megabyte, so a tile is no smaller.

The last tiles come first: the pass before ended there, and what it wrote is still in the cache. The
next pass begins at the front, where this one ends.
"""

from collections.abc import Callable
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_largebatch import norms
from optax_largebatch.params.shapes import Axes, Shape

MAX_TILE_ELEMENTS = 2**15
"""The most elements of a tile: 128 KiB of float32."""

TILES_PER_ITERATION = 4
"""Added to the sums in one expression; more take longer to compile."""

ALIGNMENT = 16
"""A row of a tile has a multiple of so many elements, the length of a processor's vectors."""


class Tiles(NamedTuple):
    """How an array is cut: each block is a row, and all rows are cut at the same columns."""

    shape: Shape
    """The shape of the array."""
    kept: Axes
    """The axes that run over its blocks; they are the first."""
    rows: int
    columns: int
    """The columns of a tile."""

    @classmethod
    def of(cls, shape: Shape, kept: Axes) -> "Tiles | None":
        """Large tiles of an array whose blocks lie along the axes `kept`, with a small rest.

        None for blocks that are not contiguous, and for more blocks than a tile can hold parts of.
        There are two iterations at least: XLA unrolls a loop of one, and makes a slow kernel of it.
        """
        size = math.prod(shape)
        rows = math.prod(norms.lengths_along(shape, kept))
        if not size or kept != tuple(range(len(kept))):
            return None
        length = size // rows
        most = min(MAX_TILE_ELEMENTS // rows, length // (2 * TILES_PER_ITERATION)) // ALIGNMENT
        if not most:
            return None
        columns = ALIGNMENT * min(
            range(most, most // 2, -1),
            key=lambda n: length % (TILES_PER_ITERATION * ALIGNMENT * n),
        )
        return cls(shape, kept, rows, columns)

    @property
    def shape_of_blocks(self) -> Shape:
        """The shape of an array with an element for each block, which broadcasts."""
        return norms.shape_of_blocks(self.shape, self.kept)

    def can_tile(self, x: jax.Array) -> bool:
        """Whether an array has as many elements as the leaf, one for each block, or one."""
        return x.shape in (self.shape, self.shape_of_blocks, ())

    def sums(
        self,
        terms: Callable[[Any], list[jax.Array]],
        arrays: Any,
    ) -> list[jax.Array]:
        """The sums over each block of terms that are computed element by element.

        Args:
            terms: computes the terms from the arrays, or from a tile of each.
            arrays: a tree of arrays that can be cut.

        Returns:
            Arrays with an element for each block: shape () or, say, (layers, 1, 1).
        """
        rows = jax.tree.map(lambda x: x.reshape(self.rows, -1) if x.ndim else x, arrays)
        length = math.prod(self.shape) // self.rows
        iterations, rest = divmod(length, TILES_PER_ITERATION * self.columns)

        def terms_of_tile(start: Any, columns: int) -> list[jax.Array]:
            def cut(x: jax.Array) -> jax.Array:
                if not x.ndim or x.shape[1] == 1:
                    return x
                return jax.lax.dynamic_slice_in_dim(x, start, columns, axis=1)

            tile = jax.tree.map(cut, rows)
            return _paired(terms(tile))

        def iteration(index: Any, totals: list[jax.Array]) -> list[jax.Array]:
            for k in range(TILES_PER_ITERATION):
                number = (iterations - 1 - index) * TILES_PER_ITERATION + k
                tile = terms_of_tile(number * self.columns, self.columns)
                totals = list(map(operator.add, totals, tile))
            return totals

        kinds = jax.eval_shape(lambda: terms_of_tile(0, self.columns))
        totals = [jnp.zeros(x.shape, x.dtype) for x in kinds]
        totals = jax.lax.fori_loop(0, iterations, iteration, totals)
        sums = self._sums(totals)
        if rest:
            last = self._sums(terms_of_tile(length - rest, rest))
            sums = list(map(operator.add, sums, last))
        return sums

    def _sums(self, pairs: list[jax.Array]) -> list[jax.Array]:
        """The sums of rows, in the shape of the blocks."""
        return [norms.block_sum(x, (0,)).reshape(self.shape_of_blocks) for x in _single(pairs)]


def _paired(terms: list[jax.Array]) -> list[jax.Array]:
    """Each two terms as one complex array; the first of an odd number stays as it is.

    It is often the norm of a parameter, and needs no computation.
    """
    odd = len(terms) % 2
    pairs = map(jax.lax.complex, terms[odd::2], terms[odd + 1 :: 2])
    return [*terms[:odd], *pairs]


def _single(pairs: list[jax.Array]) -> list[jax.Array]:
    """The terms, out of their pairs."""
    terms: list[jax.Array] = []
    for x in pairs:
        terms += [x.real, x.imag] if jnp.iscomplexobj(x) else [x]
    return terms
