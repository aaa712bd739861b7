"""Trees like the parameters, parts of which are hidden."""

import contextlib
from typing import Any

import jax

from optax_largebatch.params.leaves import Leaves
from optax_largebatch.params.paths import is_hidden


def columns(leaves: Leaves, name: str, tree: Any) -> list[Any]:
    """The parts of a tree at the places of the parameters.

    One hidden node may stand for all parameters below it, as after `optax.partition` with labels
    that are a prefix of the parameters.

    Args:
        leaves: the parameters.
        name: what the tree is, for messages.
        tree: the tree.

    Returns:
        An array or a hidden node for each parameter.

    Raises:
        ValueError: the tree has another structure.
    """

    def for_each(own: Any, below: Any) -> Any:
        return jax.tree.map(lambda _: own, below) if is_hidden(own) else own

    with contextlib.suppress(ValueError):  # `align` says what differs
        tree = jax.tree.map(for_each, tree, leaves.tree, is_leaf=is_hidden)
    return leaves.align(name, tree)


def rebuilt(like: Any, found: list[Any]) -> Any:
    """What `columns` returned, as a tree again.

    Args:
        like: a tree in which the same parameters are hidden.
        found: an array or a hidden node for each parameter.
    """
    shown = [own for own in found if not is_hidden(own)]
    return jax.tree.unflatten(jax.tree.structure(like), shown)
