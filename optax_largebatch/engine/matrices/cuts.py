"""How matrices are cut into the parts that devices have, and put together from them."""

from collections.abc import Callable, Mapping
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_largebatch import norms
from optax_largebatch.engine.matrices.groups import Shared, ways_to_share
from optax_largebatch.params.matrices import Matrices


class Exchange(NamedTuple):
    """What the matrices of one exchange have in common."""

    function: Callable[..., jax.Array]
    shape: tuple[int, ...]
    """The sides of a matrix, the shorter one first."""
    dtype: jnp.dtype
    across: tuple[str, ...]
    """The mesh axes along which each matrix is split."""
    copies: tuple[str, ...]
    """The mesh axes along which all devices have the same matrices."""
    splits: bool
    """Whether the function may be given a matrix in parts, on a group of devices."""

    @property
    def moves(self) -> bool:
        """Whether several devices take part."""
        return norms.devices_along((*self.across, *self.copies)) > 1


class Cut(NamedTuple):
    """How a matrix is cut into the parts that devices have."""

    lengths: tuple[int, ...]
    """Lengths of a part, along the axes of its rows and those of its columns."""
    names: tuple[tuple[str, ...], ...]
    """The mesh axes that cut each axis."""
    rows: int
    """How many of the axes are those of the rows."""
    is_high: bool
    """Whether there are more rows than columns; in the exchange a matrix lies on its long side."""

    @property
    def unit(self) -> int:
        """What the columns of a device in a group are a multiple of, in the exchange."""
        long = self._long
        others = math.prod(self.lengths[axis] for axis in long) // max(self.lengths[self._axis], 1)
        return max(others, 1) * math.prod(map(norms.devices_along, (self.names[k] for k in long)))

    def piece(self, columns: int) -> "Cut":
        """The cut into the pieces of a group, whose devices have so many columns."""
        lengths = list(self.lengths)
        lengths[self._axis] = columns // self.unit
        return self._replace(lengths=tuple(lengths))

    def pieces(self, parts: jax.Array, size: int, columns: int) -> jax.Array:
        """For each device of a group, pieces of parts: (pieces, matrices, elements of a piece)."""
        axis, number = self._axis + 1, parts.shape[0]
        length = self.piece(columns).lengths[self._axis]
        x = parts.reshape(number, *self.lengths)
        missing = size * length - x.shape[axis]
        x = jnp.pad(x, [(0, missing if k == axis else 0) for k in range(x.ndim)])
        x = x.reshape(*x.shape[:axis], size, length, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0).reshape(size, number, -1)

    def parts(self, pieces: jax.Array, columns: int) -> jax.Array:
        """The parts of matrices; the reverse of `pieces`."""
        axis, (size, number, _) = self._axis + 1, pieces.shape
        x = pieces.reshape(size, number, *self.piece(columns).lengths)
        x = jnp.moveaxis(x, 0, axis)
        x = x.reshape(*x.shape[:axis], size * x.shape[axis + 1], *x.shape[axis + 2 :])
        own = jax.lax.slice_in_dim(x, 0, self.lengths[self._axis], axis=axis)
        return own.reshape(number, math.prod(self.lengths))

    @property
    def _long(self) -> range:
        """The axes of the long side."""
        return range(self.rows) if self.is_high else range(self.rows, len(self.lengths))

    @property
    def _axis(self) -> int:
        """The axis that a group shares."""
        return max(self._long, key=lambda axis: self.lengths[axis])

    def joined(self, parts: jax.Array, exchange: Exchange) -> jax.Array:
        """Matrices from their parts: (devices, matrices, elements) to (matrices, rows, columns)."""
        sizes, order = self._order(exchange)
        x = parts.reshape(*sizes, parts.shape[1], *self.lengths)
        return jnp.transpose(x, order).reshape(parts.shape[1], *exchange.shape)

    def apart(self, matrices: jax.Array, exchange: Exchange) -> jax.Array:
        """The parts of matrices; the reverse of `joined`."""
        sizes, order = self._order(exchange)
        lengths = (*sizes, matrices.shape[0], *self.lengths)
        x = matrices.reshape([lengths[axis] for axis in order])
        x = jnp.transpose(x, np.argsort(order).tolist())
        devices = norms.devices_along(exchange.across)
        return x.reshape(devices, matrices.shape[0], math.prod(self.lengths))

    def _order(self, exchange: Exchange) -> tuple[list[int], list[int]]:
        """The lengths of the mesh axes, and where each axis stands in a whole matrix."""
        across = exchange.across
        whole = [
            [*map(across.index, names), axis]
            for axis, names in enumerate(self.names, len(across) + 1)
        ]
        turned = self.rows if self.is_high else 0
        whole = [*whole[turned:], *whole[:turned]]
        return [norms.devices_along((x,)) for x in across], [len(across), *itertools.chain(*whole)]


class Share(NamedTuple):
    """Matrices of an exchange that are cut alike."""

    cut: Cut
    first: int
    last: int
    """The number of the first matrix, and of the one after the last."""


def cut_of(x: jax.Array, matrices: Matrices) -> Cut:
    """How the matrices of an array are cut."""
    axes = (*matrices.rows, *matrices.columns)
    names = [tuple(filter(norms.is_bound, matrices.layout.mesh_axes[axis])) for axis in axes]
    height, width = matrices.shape
    lengths = tuple(x.shape[axis] for axis in axes)
    return Cut(lengths, tuple(names), len(matrices.rows), height > width)


def shared(exchange: Exchange, numbers: Mapping[Cut, int]) -> Shared:
    """The cheapest way to share out the matrices of an exchange.

    Args:
        exchange: what they have in common.
        numbers: how many are cut in which way.
    """
    axes = {name: norms.devices_along((name,)) for name in (*exchange.across, *exchange.copies)}
    height, width = exchange.shape
    unit = math.lcm(*(cut.unit for cut in numbers))
    itemsize = exchange.dtype.itemsize
    ways = ways_to_share(sum(numbers.values()), (height, width), axes, itemsize, unit)
    return min(ways, key=lambda way: way.cost) if exchange.splits else next(ways)
