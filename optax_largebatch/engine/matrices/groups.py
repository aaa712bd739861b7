"""Groups of devices that share a matrix, where there are fewer matrices than devices.

In a group each device has some columns of every row, a matrix lying on its long side. Which columns
does not matter to functions that `each_matrix(..., splits=True)` is given: they are sums of
products, such as a Newton-Schulz iteration. Whether a group is worth what it sends is said by a
model of one step of five iterations, with the operations of its products and the bytes of a device.
"""

from collections.abc import Iterator, Mapping
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from optax_largebatch import norms

OPERATIONS_OF_A_BYTE = 2048
"""What a device multiplies and adds in the time in which it sends a byte: an H100 on NVLink and a
v5e along one axis of its torus, both in bfloat16, by what their makers say."""

ITERATIONS = 5


class Group(NamedTuple):
    """The devices that share a matrix with this one; without an axis, it is alone.

    They follow each other along a mesh axis.
    """

    axis: str = ""
    size: int = 1

    def sum(self, x: jax.Array) -> jax.Array:
        """The sum over the group of what its devices have."""
        if self.size == 1:
            return x
        if x.ndim and x.shape[0] % self.size == 0:
            # JAX refuses `psum` over a part of an axis where it checks what varies.
            return self.gathered(
                jax.lax.psum_scatter(x, self.axis, axis_index_groups=self._all, tiled=True)
            )
        return jnp.sum(jax.lax.all_gather(x, self.axis, axis_index_groups=self._all), axis=0)

    def rows(self, x: jax.Array) -> jax.Array:
        """The rows of this device, if the group shares the rows of an array that each has."""
        if self.size == 1:
            return x
        number = x.shape[0] // self.size
        rank = jax.lax.axis_index(self.axis) % self.size
        return jax.lax.dynamic_slice_in_dim(x, rank * number, number)

    def gathered(self, rows: jax.Array) -> jax.Array:
        """All rows, from those of each device; the reverse of `rows`."""
        if self.size == 1:
            return rows
        return jax.lax.all_gather(rows, self.axis, axis_index_groups=self._all, tiled=True)

    @property
    def _all(self) -> list[list[int]] | None:
        """The groups along the axis; None if it is one."""
        number = norms.devices_along((self.axis,))
        if number == self.size:
            return None
        return [[*range(k, k + self.size)] for k in range(0, number, self.size)]


ALONE = Group()


class Shared(NamedTuple):
    """How the matrices of one exchange are shared out, and what it costs the busiest device."""

    group: Group
    turns: int
    """How many matrices each group works on, counting those that are missing."""
    missing: int
    columns: int
    """How many columns of a matrix each device of a group has."""
    operations: int
    """Multiplications and additions."""
    bytes: int
    """The bytes that it sends: to its group, and for the way of the matrices there and back."""

    @property
    def cost(self) -> int:
        """Operations, and those that could have been done while bytes are sent."""
        return self.operations + OPERATIONS_OF_A_BYTE * self.bytes


def ways_to_share(
    number: int, sides: tuple[int, int], axes: Mapping[str, int], itemsize: int, unit: int = 1
) -> Iterator[Shared]:
    """Every size of a group along every axis of a mesh, the devices alone first.

    Args:
        number: how many matrices there are.
        sides: of a matrix, the shorter one first.
        axes: the devices along each mesh axis.
        itemsize: the bytes of an element.
        unit: what the columns of a device have to be a multiple of.
    """
    height, width = sides
    devices = math.prod(axes.values())
    groups = [
        Group(axis, size)
        for axis, length in axes.items()
        for size in range(2, length + 1)
        if length % size == 0 and height % size == 0
    ]
    for group in (ALONE, *groups):
        size = group.size
        turns = -(-number * size // devices)
        columns = width if size == 1 else -(-width // (size * unit)) * unit
        operations = 4 * height**2 * columns + 2 * height**3 // size
        # The sum of the products is scattered and gathered, then their square is gathered.
        within = 3 * height**2 * (size - 1) // size
        trips = 2 * height * columns
        yield Shared(
            group,
            turns,
            turns * (devices // size) - number,
            columns,
            turns * ITERATIONS * operations,
            turns * itemsize * (ITERATIONS * within + trips),
        )
