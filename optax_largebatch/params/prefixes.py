"""Trees that say something of each parameter, where one entry may speak for a whole subtree."""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class _Entry:
    """An entry and the number of leaves that it speaks for."""

    value: Any
    leaves: int


def broadcast_prefix(
    name: str, prefix: Any, params: Any, is_leaf: Callable[[Any], bool] | None = None
) -> list[Any]:
    """The entry of `prefix` for each leaf of `params`, in the order of `jax.tree.leaves`.

    Args:
        name: what `prefix` is, for the message.
        prefix: a tree of the structure of `params`, or a prefix of it.
        params: the parameters.
        is_leaf: tells the entries of `prefix`, where they are trees themselves.

    Returns:
        One entry for each leaf.

    Raises:
        ValueError: `prefix` is no prefix of `params`.
    """

    def entry(value: Any, part: Any) -> _Entry:
        return _Entry(value, len(jax.tree.leaves(part)))

    try:
        entries = jax.tree.leaves(jax.tree.map(entry, prefix, params, is_leaf=is_leaf))
    except ValueError as error:
        raise ValueError(
            f"{name} must have the tree structure of the parameters or be a prefix of it: {error}"
        ) from None
    return [entry.value for entry in entries for _ in range(entry.leaves)]
