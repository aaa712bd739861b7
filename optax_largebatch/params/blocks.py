"""The blocks of parameters: what is left of each without its stacked axes, such as one layer."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_largebatch.norms import lengths_along, other_axes
from optax_largebatch.params.fused import Sides
from optax_largebatch.params.paths import leaf_names, of_shapes
from optax_largebatch.params.shapes import Axes, Pair, Shape, is_vector
from optax_largebatch.params.stacked import Stacked


class Block(NamedTuple):
    """A parameter, as one of its layers is."""

    name: str
    axes: Axes
    """The axes of the parameter that are not stacked."""
    shape: Shape
    """The lengths of these axes."""
    stack: Axes
    """The axes of the parameter that are stacked."""
    is_vector: bool
    """Whether it has one axis, by its shape or its name."""
    sides: Sides | str | None = None
    """The rows and columns as axes of the parameter, or a text that says them; None for no matrix,
    or where nobody has asked."""
    is_said: bool = False
    """Whether `matrix_axes` or a type says them, so that nobody has to guess."""

    @classmethod
    def of(cls, name: str, shape: Shape, stack: Axes = ()) -> "Block":
        """The block of a parameter with these stacked axes."""
        axes = other_axes(len(shape), stack)
        lengths = lengths_along(shape, axes)
        return cls(name, axes, lengths, stack, is_vector(name, lengths))

    @property
    def is_matrix(self) -> bool:
        """Whether it has two axes, and is no vector."""
        return len(self.shape) == 2 and not self.is_vector

    def pair(self, places: Pair) -> Pair:
        """Rows and columns of the block, as axes of the parameter."""
        rows, columns = (tuple(self.axes[place] for place in side) for side in places)
        return rows, columns


@of_shapes
def blocks_of(params: Any, stacked: Stacked) -> list[Block]:
    """The blocks of all parameters."""
    shapes = map(np.shape, jax.tree.leaves(params))
    return list(map(Block.of, leaf_names(params), shapes, stacked.axes(params)))


class Layers(NamedTuple):
    """The shape of a parameter that stacks layers: its stacked axes, and those of a block."""

    shape: Shape
    axes: Axes
    """The stacked axes."""
    stack: Shape
    """The lengths of the stacked axes."""
    block: Shape
    """The lengths of the other axes, those of length 1 left out."""

    @classmethod
    def of(cls, shape: Shape, axes: Axes) -> "Layers":
        """The layers of a parameter of this shape."""
        stack = lengths_along(shape, axes)
        block = lengths_along(shape, other_axes(len(shape), axes))
        return cls(shape, axes, stack, tuple(size for size in block if size != 1))

    def first(self, x: jax.Array) -> jax.Array:
        """An array like the parameter with the stack on its leading axes."""
        x = jnp.moveaxis(x, self.axes, range(len(self.axes)))
        return x.reshape(*self.stack, *self.block)

    def back(self, x: jax.Array) -> jax.Array:
        """The reverse of `first`."""
        others = lengths_along(self.shape, other_axes(len(self.shape), self.axes))
        x = x.reshape(*self.stack, *others)
        return jnp.moveaxis(x, range(len(self.axes)), self.axes)

    def each(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function for one block, mapped over stacks of blocks on leading axes."""
        for _ in self.axes:
            function = jax.vmap(function)
        return function
