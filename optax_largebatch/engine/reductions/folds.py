"""Several sums of what is computed from one array, in one kernel.

XLA on a CPU makes a kernel for each array that it computes, and each kernel reads and computes
again what it shares with others. Only a reduction of several arrays at once is a single kernel, and
it does not store the arrays that it reduces. It is fast if each result adds few elements that lie
close together: then the arrays are read from one end to the other. So an array is cut into short
pieces, each is folded a few times, and what lies on top of each other is added; the rest is a sum
of arrays in memory, a fraction of the size. Few elements are folded as one piece, and then their
layers: all of their sums take two kernels, where XLA makes several for each.
"""

from collections.abc import Callable
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_largebatch import norms
from optax_largebatch.engine.compilation import merged_inside, outlined

LAYERS = range(6, 10)
"""The largest number of layers; for many more, the compiler makes a loop, four times as slow."""

WIDTH = 16
"""The elements of a layer, which the vectors of a processor hold."""

WIDTH_OF_FEW = 64
"""The elements of a layer for small arrays: the root of their largest size."""


class Fold(NamedTuple):
    """How an array is folded: each block for itself, piece by piece, into layers."""

    shape: tuple[int, ...]
    """The shape of the array."""
    kept: tuple[int, ...]
    """The axes along which its blocks lie, the first of all."""
    layers: int
    """The layers of a piece; the rest of a block is shorter than a piece."""

    @classmethod
    def of(cls, shape: tuple[int, ...], kept: tuple[int, ...]) -> "Fold | None":
        """The fold that leaves least over; None for blocks that are too short or not contiguous."""
        length = math.prod(shape[len(kept) :])
        if length < max(LAYERS) * WIDTH or kept != tuple(range(len(kept))):
            return None
        return cls(shape, kept, min(LAYERS, key=lambda n: length % (n * WIDTH)))

    @property
    def left_over(self) -> int:
        """The elements at the end of a block that do not fill a piece."""
        return math.prod(self.shape[len(self.kept) :]) % (self.layers * WIDTH)

    @property
    def kernels(self) -> int:
        """The number of kernels that read the arrays: one that folds, and one for the rest."""
        return 2 if self.left_over else 1

    def sums(self, terms: Callable[[Any], list[jax.Array]], arrays: Any) -> list[jax.Array]:
        """The sums over each block of computed terms.

        Args:
            terms: what is to be summed, from the arrays.
            arrays: a tree of arrays.

        Returns:
            Arrays with an element for each block: shape () or, say, (layers, 1, 1).
        """
        kept = len(self.kept)
        blocks, length = math.prod(self.shape[:kept]), math.prod(self.shape[kept:])
        even = length - self.left_over

        def rows(arrays: Any) -> list[jax.Array]:
            return [x.reshape(blocks, length) for x in terms(arrays)]

        def layers(arrays: Any) -> list[jax.Array]:
            pieces = (blocks, -1, self.layers, WIDTH)
            return _added([x[:, :even].reshape(pieces) for x in rows(arrays)], 2)

        def left_over(arrays: Any) -> list[jax.Array]:
            return _added([x[:, even:] for x in rows(arrays)], 1)

        # Apart, or XLA would keep in memory what both are computed from.
        with outlined():
            added = jax.jit(merged_inside(layers))(arrays)
            rest = jax.jit(merged_inside(left_over))(arrays) if self.left_over else None
        sums = [norms.block_sum(x, (0,)).reshape(-1) for x in added]
        if rest:
            sums = [x + y for x, y in zip(sums, rest, strict=True)]
        return [x.reshape(norms.shape_of_blocks(self.shape, self.kept)) for x in sums]


def sums_of_few(terms: list[jax.Array], kept: tuple[int, ...]) -> list[jax.Array]:
    """The sums over each block of arrays of one shape that have few elements, in two kernels.

    The blocks lie along the first axes. The last layer is filled up, which is cheap for few.
    """
    shape = terms[0].shape
    blocks, length = shape[: len(kept)], math.prod(shape[len(kept) :])
    layers = math.ceil(length / WIDTH_OF_FEW)
    filling = [(0, 0, 0)] * len(kept) + [(0, layers * WIDTH_OF_FEW - length, 0)]

    def folded(x: jax.Array) -> jax.Array:
        filled = jax.lax.pad(x.reshape(*blocks, length), np.zeros((), x.dtype), filling)
        return filled.reshape(*blocks, layers, WIDTH_OF_FEW)

    sums = _added(_added([folded(x) for x in terms], len(kept)), len(kept))
    return [x.reshape(norms.shape_of_blocks(shape, kept)) for x in sums]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _added(arrays: list[jax.Array], axis: int) -> list[jax.Array]:
    """The sums of arrays of one shape along an axis."""

    def add(some: tuple[jax.Array, ...], more: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(x + y for x, y in zip(some, more, strict=True))

    zeros = tuple(np.zeros((), x.dtype) for x in arrays)
    return list(jax.lax.reduce(tuple(arrays), zeros, add, (axis,)))


@_added.defjvp
def _tangents_added(axis: int, primals: Any, tangents: Any) -> tuple[Any, Any]:
    """A derivative rule, because JAX's own needs every array to depend on the variable."""
    return _added(*primals, axis), [jnp.sum(x, axis) for x in tangents[0]]
