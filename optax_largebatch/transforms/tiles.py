"""An array cut into tiles, of which each is added, element by element, to the sums so far.

What is computed of a tile never leaves the cache, and nor do the sums, an array of the size of a
tile; all sums share the loop and what they read.
"""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_largebatch import norms

MOST_ELEMENTS = 2**14
"""Of a tile: 64 KiB of float32."""

ALIGNMENT = 16
"""Rows of a tile have a multiple of so many elements, which the vectors of a processor hold."""


class Tiles(NamedTuple):
    """How an array is cut: each block is a row, and all rows are cut at the same columns."""

    shape: tuple[int, ...]
    """That of the array."""
    kept: tuple[int, ...]
    """The axes along which its blocks lie, the first of all."""
    rows: int
    columns: int
    """Of a tile."""

    @classmethod
    def of(cls, shape: tuple[int, ...], kept: tuple[int, ...]) -> "Tiles | None":
        """The largest tiles of an array whose blocks lie along the axes `kept`.

        None for blocks that are not contiguous, and where a tile cannot hold a part of each.
        """
        size = math.prod(shape)
        rows = math.prod(shape[axis] for axis in kept)
        most = MOST_ELEMENTS // max(rows, 1) // ALIGNMENT * ALIGNMENT
        if not size or not most or kept != tuple(range(len(kept))):
            return None
        even = (n for n in range(most, most // 8, -ALIGNMENT) if size // rows % n == 0)
        return cls(shape, kept, rows, next(even, most))

    @property
    def shape_of_blocks(self) -> tuple[int, ...]:
        """That of an array with an element for each block, which broadcasts."""
        return tuple(n if axis in self.kept else 1 for axis, n in enumerate(self.shape))

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

        def terms_of_tile(start: Any, columns: int) -> list[jax.Array]:
            def cut(x: jax.Array) -> jax.Array:
                if not x.ndim or x.shape[1] == 1:
                    return x
                return jax.lax.dynamic_slice_in_dim(x, start, columns, axis=1)

            return terms(jax.tree.map(cut, rows))

        def with_tile(index: Any, totals: list[jax.Array]) -> list[jax.Array]:
            tile = terms_of_tile(index * self.columns, self.columns)
            return [total + term for total, term in zip(totals, tile, strict=True)]

        shapes = jax.eval_shape(lambda: terms_of_tile(0, self.columns))
        totals = [jnp.zeros(x.shape, x.dtype) for x in shapes]
        number, rest = divmod(math.prod(self.shape) // self.rows, self.columns)
        totals = self._sums(jax.lax.fori_loop(0, number, with_tile, totals))
        if not rest:
            return totals
        last = self._sums(terms_of_tile(number * self.columns, rest))
        return [total + term for total, term in zip(totals, last, strict=True)]

    def _sums(self, rows: list[jax.Array]) -> list[jax.Array]:
        """The sums of rows, in the shape of the blocks."""
        if not self.kept:
            return [norms.block_sum(x) for x in rows]
        return [norms.block_sum(x, (0,)).reshape(self.shape_of_blocks) for x in rows]
