"""Groups of devices that share a matrix, for when there are fewer matrices than devices.

Each device of a group has some columns of every row; a matrix lies on its long side. Functions that
say `each_matrix(..., splits=True)` are sums of products, such as a Newton-Schulz iteration, so they
do not need to know which columns. A model decides if a group is worth what it sends: it counts the
operations and the bytes of a step of five iterations.
"""

from collections.abc import Iterator, Mapping
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from optax_largebatch import norms

OPERATIONS_OF_A_BYTE = 2048
"""The multiplications and additions in the time that a device needs to send a byte. By their
makers' numbers it is the same for an H100 on NVLink and a v5e along one axis of its torus, both in
bfloat16."""

ITERATIONS = 5


class DeviceGroup(NamedTuple):
    """The devices that share a matrix with this one; without an axis it is alone.

    They follow each other along a mesh axis.
    """

    axis: str = ""
    size: int = 1

    def sum(self, x: jax.Array) -> jax.Array:
        """The sum of an array over the devices of the group."""
        if self.size == 1:
            return x
        if x.ndim and x.shape[0] % self.size == 0:
            # JAX refuses `psum` over a part of an axis if it checks which arrays vary.
            return self.gathered(
                jax.lax.psum_scatter(x, self.axis, axis_index_groups=self._all, tiled=True)
            )
        return jnp.sum(jax.lax.all_gather(x, self.axis, axis_index_groups=self._all), axis=0)

    def rows(self, x: jax.Array) -> jax.Array:
        """This device's share of the rows of an array that all devices of the group have."""
        if self.size == 1:
            return x
        number = x.shape[0] // self.size
        rank = jax.lax.axis_index(self.axis) % self.size
        return jax.lax.dynamic_slice_in_dim(x, rank * number, number)

    def gathered(self, rows: jax.Array) -> jax.Array:
        """The array with the rows of all devices, the reverse of `rows`."""
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


ALONE = DeviceGroup()


class SharingPlan(NamedTuple):
    """How devices share the matrices of one exchange, and what it costs the busiest device."""

    group: DeviceGroup
    matrices_per_group: int
    """Padding included."""
    padding: int
    """How many matrices of zeros fill up the last groups."""
    columns: int
    """The columns of a matrix that each device of a group has."""
    operations: int
    """Multiplications and additions."""
    bytes: int
    """What it sends: to its group, and with the matrices there and back."""

    @property
    def cost(self) -> int:
        """The operations, and those that fit into the time of sending the bytes."""
        return self.operations + OPERATIONS_OF_A_BYTE * self.bytes


def sharing_plans(
    number: int,
    sides: tuple[int, int],
    axes: Mapping[str, int],
    itemsize: int,
    unit: int = 1,
) -> Iterator[SharingPlan]:
    """A plan for every size of a group along every mesh axis; the first is without groups.

    Args:
        number: how many matrices there are.
        sides: of a matrix, the shorter one first.
        axes: the devices along each mesh axis.
        itemsize: the bytes of an element.
        unit: the columns of a device are a multiple of it.
    """
    height, width = sides
    devices = math.prod(axes.values())
    groups = [
        DeviceGroup(axis, size)
        for axis, length in axes.items()
        for size in range(2, length + 1)
        if length % size == 0 and height % size == 0
    ]
    for group in (ALONE, *groups):
        size = group.size
        per_group = -(-number * size // devices)
        columns = -(-width // (size * unit)) * unit
        operations = 4 * height**2 * columns + 2 * height**3 // size
        # The sum of the products is scattered and gathered, then their square is gathered.
        within = 3 * height**2 * (size - 1) // size
        there_and_back = 2 * height * columns
        yield SharingPlan(
            group,
            matrices_per_group=per_group,
            padding=per_group * (devices // size) - number,
            columns=columns,
            operations=per_group * ITERATIONS * operations,
            bytes=per_group * itemsize * (ITERATIONS * within + there_and_back),
        )
