"""The arrays that the passes over a leaf start from, and those that they find."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_largebatch import norms
from optax_largebatch.engine.requests import EachMatrix, Request


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


class LeafArrays(NamedTuple):
    """The arrays that the program of one leaf starts from."""

    gradient: jax.Array
    param: jax.Array | None
    state: Any

    def dtype(self) -> jnp.dtype:
        """The dtype that the leaf is computed with."""
        own = (x.dtype for x in (self.gradient, self.param) if x is not None)
        return norms.accumulation_dtype(*own)


class Known(NamedTuple):
    """What is known of a leaf after some of its passes."""

    stored: tuple[jax.Array, ...] = ()
    """The arrays that were materialized."""
    answers: tuple[tuple[jax.Array, ...], ...] = ()
    """The answers of each round: sums and means, or the result of work on matrices."""
    numbers: tuple[jax.Array, ...] = ()
    """The first of the numbers that the program has asked to be known beforehand."""

    def after(self, stored: Sequence[jax.Array], answers: Sequence[jax.Array]) -> "Known":
        """What is known one round later."""
        return self._replace(
            stored=(*self.stored, *stored), answers=(*self.answers, tuple(answers))
        )


class Stop(NamedTuple):
    """Where a program stops: at a request without an answer, or at its end."""

    stored: tuple[jax.Array, ...]
    """The arrays that it materializes on the way, without those that are known."""
    numbers: tuple[jax.Array, ...]
    """The numbers that it asks for on the way to be known beforehand."""
    request: Request | EachMatrix | None
    result: Any
    """The update and the new state, at the end."""
