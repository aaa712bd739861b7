"""The matrices in a parameter, and functions of each of them."""

from collections import Counter
from collections.abc import Callable, Sequence
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_largebatch import norms
from optax_largebatch.params.fused import Fused, from_batch, to_batch
from optax_largebatch.params.leaves import LeafSharding, MeshAxes
from optax_largebatch.params.shapes import Axes, Shape


class Matrices(NamedTuple):
    """The matrices in one parameter; the axes that are neither rows nor columns stack them."""

    rows: Axes
    """The axes that one multiplies over, in `inputs @ matrix`."""
    columns: Axes
    sharding: LeafSharding
    specs_known: bool = False
    """Whether `update` is given the spec of the parameter. If so, devices have the same along all
    other mesh axes; the array types may say so, too."""
    fused: Fused | None = None
    """What each of them is fused of, if it is."""
    by_text: bool = False
    """Whether a text says what they are, so that nobody has to ask."""

    @property
    def whole(self) -> "Matrices":
        """The same matrices, for a parameter that every device has whole."""
        nothing = tuple(() for _ in self.sharding.shape)
        return self._replace(sharding=self.sharding._replace(mesh_axes=nothing))

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of one matrix."""
        lengths = self.sharding.shape
        rows = math.prod(norms.lengths_along(lengths, self.rows))
        columns = math.prod(norms.lengths_along(lengths, self.columns))
        return rows, columns

    @property
    def counts(self) -> dict[tuple[int, int], int]:
        """How many matrices of each shape there are in the parameter."""
        number = math.prod(norms.lengths_along(self.sharding.shape, self.stack))
        number *= self.fused.number if self.fused else 1
        return {shape: number * times for shape, times in Counter(self.shapes).items()}

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The rows and columns of the matrices that one is fused of, or its own."""
        return self.fused.shapes if self.fused else [self.shape]

    def spread(self, values: Sequence[float], dtype: jnp.dtype) -> Any:
        """A value for each of `shapes`, in an array that broadcasts over this device's shard."""
        if self.fused is None or len({*values}) == 1:
            return values[0]
        place, vector = self.fused.spread(values)
        lengths = [1] * len(self.sharding.shape)
        lengths[self.sides[place]] = -1
        whole = jnp.asarray(vector, dtype).reshape(lengths)
        return self.sharding.local_shard(whole)

    @property
    def sides(self) -> Axes:
        """The axes of rows, and then those of columns."""
        return (*self.rows, *self.columns)

    @property
    def stack(self) -> Axes:
        """The axes that stack matrices."""
        return norms.other_axes(len(self.sharding.shape), self.sides)

    def to_batch(self, x: jax.Array) -> jax.Array:
        """The matrices of an array like the parameter, or their shards, as a batch."""
        return to_batch(x, self.rows, self.columns)

    def from_batch(self, matrices: jax.Array, shape: Shape) -> jax.Array:
        """The array of this shape, the reverse of `to_batch`."""
        return from_batch(matrices, shape, self.rows, self.columns)

    def opened(self, shape: Shape) -> "tuple[Matrices, Shape] | None":
        """The matrices that these are fused of, by an axis for each word that cuts an axis.

        Args:
            shape: of this device's shard.

        Returns:
            They, and the shape of the shard with all these axes; None if their lengths differ, or
            if a shard has only pieces of some of them.
        """
        if self.fused is None or len(self.fused.segments) > 1:
            return None
        words = dict(zip(self.sides, self.fused.words, strict=True))
        axes: list[int] = []  # for each of the new axes the one that it comes from
        of_shard: list[int] = []
        whole: list[int] = []
        mesh_axes: list[MeshAxes] = []
        for axis, (length, names) in enumerate(zip(*self.sharding, strict=True)):
            lengths = words.get(axis, (length,))
            others = lengths[1:]
            here, remainder = divmod(shape[axis], math.prod(others))
            if remainder:
                return None
            axes += [axis] * len(lengths)
            of_shard += [here, *others]
            whole += lengths
            mesh_axes += [names, *[()] * len(others)]
        places = [place for side in self.sides for place, axis in enumerate(axes) if axis == side]
        matrices = self._replace(
            rows=tuple(places[k] for k in self.fused.rows),
            columns=tuple(places[k] for k in self.fused.columns),
            sharding=LeafSharding(tuple(whole), tuple(mesh_axes)),
            fused=None,
        )
        return matrices, tuple(of_shard)

    @property
    def cut_axes(self) -> Axes:
        """The axes of the sides that are cut between matrices inside; the columns if none is."""
        return tuple(axis for side in self._cut_sides for axis in (self.rows, self.columns)[side])

    @property
    def _cut_sides(self) -> list[int]:
        """The sides that are cut between matrices inside: 0 for the rows and 1 for the columns."""
        if self.fused is None:
            return []
        sides = enumerate(self.fused.sides)
        return [side for side, axes in sides if self.fused.ids_along(axes).any()] or [1]

    def sums_of_each(self, sums: jax.Array) -> jax.Array:
        """Sums for each index along a side of the matrices, added up for each matrix."""
        if self.fused is None:
            return jnp.sum(sums, self.sides, keepdims=True)
        (side,) = self._cut_sides
        ids = self.fused.ids_along(self.fused.sides[side])
        axis = 1 + side
        batch = self.to_batch(sums)
        first = jnp.moveaxis(batch, axis, 0)
        of_matrices = jax.ops.segment_sum(first, ids, ids.max() + 1)
        spread = jnp.moveaxis(of_matrices[ids], 0, axis)
        return self.from_batch(spread, sums.shape)

    def map(
        self,
        function: Callable[..., jax.Array],
        x: jax.Array,
        *scalars: jax.Array,
    ) -> jax.Array:
        """The array with `function` of each matrix and `scalars` in the place of the matrix."""
        if self.fused is not None:
            function = functools.partial(self.fused.map, function)
        of_each = jax.vmap(lambda matrix: function(matrix, *scalars))
        return self.from_batch(of_each(self.to_batch(x)), x.shape)
