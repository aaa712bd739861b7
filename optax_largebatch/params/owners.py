"""Which parameter each array of an optimizer's state belongs to.

A state holds copies of the tree of parameters: moments, sums, masters. These copies are found by
the keys of the parameters, level by level, wherever they are and whatever is hidden in them.
"""

from collections.abc import Mapping
import itertools
from typing import Any

import jax
import optax

from optax_largebatch.params.paths import is_box

Keys = tuple[str, ...]
"""The keys on the way to a node of a tree, as strings."""


def owners(state: Any, params: Any) -> list[int | None]:
    """The parameter to which each array of a state belongs.

    The array need not have the parameter's shape: some states keep a number or a row for it.

    Args:
        state: the state of any optimizer, or a tree of its structure. A state restored from a
            checkpoint may have dictionaries and lists in the place of tuples.
        params: the parameters.

    Returns:
        The number of the parameter among `jax.tree.leaves(params)`, in the order of
        `jax.tree.leaves(state)`; None for counters and the like, and for arrays that belong to
        single axes of a parameter.
    """
    numbers = {keys: number for number, (keys, _) in enumerate(keyed_arrays(params))}
    if isinstance(params, optax.LookaheadParams):  # its optimizer knows only the fast parameters
        numbers |= {keys[1:]: number for keys, number in numbers.items() if keys[0] == "fast"}
    all_keys = [keys for keys, _ in keyed_arrays(state)]

    def within(depth: int, part: list[Keys]) -> list[int | None]:
        """The owners of arrays whose first `depth` keys are the same."""
        rest = [keys[depth:] for keys in part]
        if all(keys in numbers for keys in rest):
            return [numbers[keys] for keys in rest]
        of_axes = all(keys and keys[-1].isdigit() and keys[:-1] in numbers for keys in rest)
        if of_axes or not all(rest):
            return [None] * len(part)
        children = itertools.groupby(part, key=lambda keys: keys[depth])
        return [own for _, child in children for own in within(depth + 1, list(child))]

    return within(0, all_keys)


def keyed_arrays(tree: Any) -> list[tuple[Keys, Any]]:
    """The arrays of a tree with their keys, in the order of `jax.tree.leaves`.

    Boxes of Flax around an array have no key of their own.
    """
    found = []
    for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_boxed)[0]:
        arrays = jax.tree.leaves(node)
        keys = tuple(map(_key, path))
        if len(arrays) == 1:
            found.append((keys, arrays[0]))
        else:
            found += [((*keys, str(number)), array) for number, array in enumerate(arrays)]
    return found


def children(node: Any) -> dict[str, Any]:
    """The nodes directly below a node of a tree, by their keys; none below an array."""
    if _is_boxed(node):
        return {}
    pairs = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
    return {_key(path[-1]): child for path, child in pairs if path}


def unboxed(node: Any) -> Any:
    """The array in a box of Flax; anything else as it is."""
    return jax.tree.leaves(node)[0] if _is_boxed(node) else node


def _is_boxed(node: Any) -> bool:
    """Whether a node is a box of Flax around an array, also as read back from a checkpoint."""
    if isinstance(node, Mapping):
        return list(node) == ["value"] and jax.tree_util.all_leaves(node.values())
    return is_box(node)


def _key(key: Any) -> str:
    return jax.tree_util.keystr((key,), simple=True)
