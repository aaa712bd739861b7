"""The parts of an optimizer's state, and which parameter each of its arrays belongs to.

Both are found by keys, through any nesting: wrappers, the boxes of `nnx.Optimizer`, and the
dictionaries and lists that a checkpoint makes of tuples.

A state holds copies of the tree of parameters: moments, sums, masters. These copies are found by
the keys of the parameters, level by level, wherever they are and whatever is hidden in them.
"""

from collections.abc import Iterator, Mapping
import itertools
from typing import Any, NamedTuple

import jax
import optax

from optax_largebatch.params.paths import is_box

Keys = tuple[str, ...]
"""The keys on the way to a node of a tree, as strings."""


class Part(NamedTuple):
    """A node of a state that has others below it, such as the state of one transformation."""

    keys: Keys
    """The keys on the way to the part."""
    kind: type[Any]
    """The type. A dictionary may have been a NamedTuple before it went through a checkpoint."""
    fields: dict[str, Any]
    """The nodes directly below it."""
    masked_at: Keys
    """The keys of the innermost `optax.masked` around the part, or of the state's root."""
    about: Any = None
    """What an optimizer says about the part, if it was asked."""

    def array(self, field: str) -> jax.Array:
        """A field that is one array."""
        return unboxed(self.fields[field])

    def has_fields_of(self, kind: type[tuple[Any, ...]]) -> bool:
        """Whether it has exactly the fields of a NamedTuple."""
        return set(self.fields) == set(getattr(kind, "_fields", ()))


def parts_of(state: Any) -> Iterator[Part]:
    """All parts of a state, the outer ones first.

    Args:
        state: the state, or an object that holds one, such as an `nnx.Optimizer`.
    """
    return _parts(state, (), ())


def _parts(node: Any, keys: Keys, masked_at: Keys) -> Iterator[Part]:
    below = children(node)
    if not below:
        return
    if list(below) == list(optax.MaskedState._fields):
        masked_at = keys
    yield Part(keys, type(node), below, masked_at)
    for key, child in below.items():
        yield from _parts(child, (*keys, key), masked_at)


def seen_by(part: Part, state: Any, params: Any) -> list[int]:
    """The numbers of the parameters that have moments behind the same mask as a part."""
    leaves = jax.tree.leaves(params)
    pairs = zip(keyed_arrays(state), owners(state, params), strict=True)
    return sorted(
        {
            owner
            for (keys, array), owner in pairs
            if owner is not None
            and keys[: len(part.masked_at)] == part.masked_at
            and array.shape == leaves[owner].shape
        }
    )


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
    numbers = numbers_of(params)
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


def numbers_of(params: Any) -> dict[Keys, int]:
    """The number of each parameter among `jax.tree.leaves(params)`, by its keys."""
    numbers = {keys: number for number, (keys, _) in enumerate(keyed_arrays(params))}
    if isinstance(params, optax.LookaheadParams):  # its optimizer knows only the fast parameters
        numbers |= {keys[1:]: number for keys, number in numbers.items() if keys[0] == "fast"}
    return numbers


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
