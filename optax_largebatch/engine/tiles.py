"""An array cut into tiles, of which each is added, element by element, to the sums so far.

What is computed of a tile never leaves the cache, and nor do the sums, an array of the size of a
tile. A turn of the loop adds several tiles at once, so that the sums are read and written once for
all of them. XLA on a CPU makes a kernel for each array that a turn returns, so two sums share one
as the parts of a complex number, and with it what they read and compute. It splits a kernel between
cores if that moves more than half a megabyte, which is why a tile is no smaller.

The last tiles come first: the pass before has ended there, and what it wrote is still in the cache;
and where this one ends, at the front, the next begins.
"""

from collections.abc import Callable
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_largebatch import norms

MOST_ELEMENTS = 2**15
"""The number of elements of a tile at most: 128 KiB of float32."""

TILES_OF_A_TURN = 4
"""Added to the sums in one expression, which the compiler takes the longer for."""

ALIGNMENT = 16
"""Rows of a tile have a multiple of so many elements, which the vectors of a processor hold."""


class Tiles(NamedTuple):
    """How an array is cut: each block is a row, and all rows are cut at the same columns."""

    shape: tuple[int, ...]
    """The shape of the array."""
    kept: tuple[int, ...]
    """The axes along which its blocks lie, the first of all."""
    rows: int
    columns: int
    """The columns of a tile."""

    @classmethod
    def of(cls, shape: tuple[int, ...], kept: tuple[int, ...]) -> "Tiles | None":
        """Large tiles of an array whose blocks lie along the axes `kept`, and little besides.

        None for blocks that are not contiguous, and where a tile cannot hold a part of each. There
        are two turns at least: XLA unrolls a loop of one, and makes a slow kernel of it.
        """
        size = math.prod(shape)
        rows = math.prod(shape[axis] for axis in kept)
        if not size or kept != tuple(range(len(kept))):
            return None
        length = size // rows
        most = min(MOST_ELEMENTS // rows, length // (2 * TILES_OF_A_TURN)) // ALIGNMENT
        if not most:
            return None
        widths = (ALIGNMENT * n for n in range(most, most // 2, -1))
        return cls(shape, kept, rows, min(widths, key=lambda n: length % (TILES_OF_A_TURN * n)))

    @property
    def shape_of_blocks(self) -> tuple[int, ...]:
        """The shape of an array with an element for each block, which broadcasts."""
        return norms.shape_of_blocks(self.shape, self.kept)

    def can_cut(self, x: jax.Array) -> bool:
        """Whether an array has an element for each of the whole's, for each block, or just one."""
        return x.shape in (self.shape, self.shape_of_blocks, ())

    def sums(self, terms: Callable[[Any], list[jax.Array]], arrays: Any) -> list[jax.Array]:
        """The sums over each block of what is computed element by element.

        Args:
            terms: what is to be summed, from the arrays or from a tile of each.
            arrays: a tree of arrays that can be cut.

        Returns:
            Arrays with an element for each block: shape () or, say, (layers, 1, 1).
        """
        rows = jax.tree.map(lambda x: x.reshape(self.rows, -1) if x.ndim else x, arrays)
        length = math.prod(self.shape) // self.rows
        turns, rest = divmod(length, TILES_OF_A_TURN * self.columns)

        def terms_of_tile(start: Any, columns: int) -> list[jax.Array]:
            def cut(x: jax.Array) -> jax.Array:
                if not x.ndim or x.shape[1] == 1:
                    return x
                return jax.lax.dynamic_slice_in_dim(x, start, columns, axis=1)

            return _paired(terms(jax.tree.map(cut, rows)))

        def turn(index: Any, totals: list[jax.Array]) -> list[jax.Array]:
            for k in range(TILES_OF_A_TURN):
                start = ((turns - 1 - index) * TILES_OF_A_TURN + k) * self.columns
                tile = terms_of_tile(start, self.columns)
                totals = [total + term for total, term in zip(totals, tile, strict=True)]
            return totals

        shapes = jax.eval_shape(lambda: terms_of_tile(0, self.columns))
        totals = [jnp.zeros(x.shape, x.dtype) for x in shapes]
        totals = self._sums(jax.lax.fori_loop(0, turns, turn, totals))
        if not rest:
            return totals
        last = self._sums(terms_of_tile(length - rest, rest))
        return [total + term for total, term in zip(totals, last, strict=True)]

    def _sums(self, pairs: list[jax.Array]) -> list[jax.Array]:
        """The sums of rows, in the shape of the blocks."""
        return [norms.block_sum(x, (0,)).reshape(self.shape_of_blocks) for x in _single(pairs)]


def _paired(terms: list[jax.Array]) -> list[jax.Array]:
    """Two terms each in one complex array; of an odd number the first stays as it is.

    It is often the norm of a parameter, for which there is nothing to compute.
    """
    odd = len(terms) % 2
    return [*terms[:odd], *map(jax.lax.complex, terms[odd::2], terms[odd + 1 :: 2])]


def _single(pairs: list[jax.Array]) -> list[jax.Array]:
    """The terms, out of their pairs."""
    parts = ([x.real, x.imag] if jnp.iscomplexobj(x) else [x] for x in pairs)
    return list(itertools.chain.from_iterable(parts))
