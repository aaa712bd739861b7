"""Trees with an entry for each parameter, where one entry may stand for a whole subtree."""

from collections.abc import Callable
from typing import Any

import jax

from optax_largebatch.params.paths import is_hidden


def broadcast_prefix(
    name: str, prefix: Any, params: Any, is_leaf: Callable[[Any], bool] = lambda node: False
) -> list[Any]:
    """The entry of `prefix` for each leaf of `params`, in the order of `jax.tree.leaves`.

    Args:
        name: what `prefix` is, for the message.
        prefix: a tree of the structure of `params`, or a prefix of it. Entries for hidden
            parameters (by `optax.masked` or as None) are left out.
        params: the parameters.
        is_leaf: recognises the entries of `prefix`, where they are trees themselves.

    Returns:
        One entry for each leaf.

    Raises:
        ValueError: `prefix` is no prefix of `params`.
    """

    def entries(prefix: Any, part: Any) -> list[Any]:
        if is_hidden(part):
            return []
        if is_leaf(prefix) or jax.tree_util.all_leaves([prefix]):
            return [prefix] * len(jax.tree.leaves(part))
        if jax.tree_util.all_leaves([part]):
            raise ValueError(f"{prefix!r} stands where the parameters have one array.")
        children, structure = jax.tree.flatten(part, is_leaf=lambda node: node is not part)
        columns = zip(structure.flatten_up_to(prefix), children, strict=True)
        return [entry for own, child in columns for entry in entries(own, child)]

    try:
        return entries(prefix, params)
    except ValueError as error:
        raise ValueError(
            f"{name} must have the tree structure of the parameters or be a prefix of it: {error}"
        ) from None
