"""The blocks of parameters: what is left of each without its stacked axes."""

from typing import Any, NamedTuple

import jax
import numpy as np

from optax_largebatch.params.paths import leaf_names, of_shapes
from optax_largebatch.params.shapes import Pair, is_vector
from optax_largebatch.params.stacked import Stacked


class Block(NamedTuple):
    """A parameter, as one of its layers is."""

    name: str
    axes: tuple[int, ...]
    """The axes of the parameter that are not stacked."""
    shape: tuple[int, ...]
    """The lengths of these axes."""
    stack: tuple[int, ...]
    """The axes of the parameter that are stacked."""
    is_vector: bool
    """Whether it has one axis, by its shape or its name."""

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], stack: tuple[int, ...] = ()) -> "Block":
        """The block of a parameter with these stacked axes."""
        axes = tuple([axis for axis in range(len(shape)) if axis not in stack])
        lengths = tuple([shape[axis] for axis in axes])
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
