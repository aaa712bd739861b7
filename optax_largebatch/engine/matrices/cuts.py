"""How matrices are cut into the parts that devices have, and put together from them."""

from collections.abc import Callable
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_largebatch import norms
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
    turned: int
    """How many axes come last in the exchange, where a high matrix lies on its long side."""

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
        whole = [*whole[self.turned :], *whole[: self.turned]]
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
    turned = len(matrices.rows) if height > width else 0
    return Cut(tuple(x.shape[axis] for axis in axes), tuple(names), turned)
