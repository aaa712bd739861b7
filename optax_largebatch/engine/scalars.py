"""The scalars of a step; those that are known already become constants."""

from typing import Any

import jax


@jax.tree_util.register_pytree_node_class
class Scalars:
    """A tree of scalars; as a tree of JAX, it contains only those that are arrays.

    The others are Python's numbers, the options of an optimizer. They become constants of the
    compiled program: as arguments, they would be a dozen for each leaf.

    Args:
        tree: the scalars.
    """

    def __init__(self, tree: Any):
        self.tree = tree

    def tree_flatten(self) -> tuple[list[Any], Any]:
        """The arrays, and the numbers between them; their types, since `1 == 1.0 == True`."""
        scalars, structure = jax.tree.flatten(self.tree)
        numbers = tuple((type(x), x) if type(x) in (bool, int, float) else None for x in scalars)
        arrays = [x for x, number in zip(scalars, numbers, strict=True) if number is None]
        return arrays, (structure, numbers)

    @classmethod
    def tree_unflatten(cls, known: Any, arrays: Any) -> "Scalars":
        """The reverse of `tree_flatten`."""
        structure, numbers = known
        remaining = iter(arrays)
        scalars = [next(remaining) if number is None else number[1] for number in numbers]
        return cls(structure.unflatten(scalars))
