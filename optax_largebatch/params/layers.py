"""The layers of a stack one by one, for functions that need whole layers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Layers(NamedTuple):
    """The shape of a parameter that stacks layers: its stacked axes, and those of a block."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    """The stacked axes."""
    stack: tuple[int, ...]
    """The lengths of the stacked axes."""
    block: tuple[int, ...]
    """The lengths of the other axes, those of length 1 left out."""

    @classmethod
    def of(cls, shape: tuple[int, ...], axes: tuple[int, ...]) -> "Layers":
        """The layers of a parameter of this shape."""
        block = (size for axis, size in enumerate(shape) if axis not in axes)
        stack = tuple(shape[axis] for axis in axes)
        return cls(shape, axes, stack, tuple(size for size in block if size != 1))

    def first(self, x: jax.Array) -> jax.Array:
        """An array like the parameter with the stack on its leading axes."""
        return jnp.moveaxis(x, self.axes, range(len(self.axes))).reshape(*self.stack, *self.block)

    def back(self, x: jax.Array) -> jax.Array:
        """The reverse of `first`."""
        others = (size for axis, size in enumerate(self.shape) if axis not in self.axes)
        return jnp.moveaxis(x.reshape(*self.stack, *others), range(len(self.axes)), self.axes)

    def each(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function for one block, mapped over stacks of blocks on leading axes."""
        for _ in self.axes:
            function = jax.vmap(function)
        return function
