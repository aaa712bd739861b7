"""Names of parameters, the same in every framework, and trees with an entry for each of them."""

from collections.abc import Callable
import functools
from typing import Any, TypeGuard, TypeVar

import jax
from jax.tree_util import FlattenedIndexKey, GetAttrKey
import numpy as np
import optax

T = TypeVar("T")

Named = list[tuple[str, Any]]
"""Leaves with their names."""

KEPT = 64
"""For how many trees a function keeps its result."""


def named_leaves(tree: Any) -> Named:
    """`(name, leaf)` for each leaf of a tree and for each place where one is hidden.

    A name is the keys joined by `/`, as in `"encoder/dense/kernel"`. Flax wraps leaves in boxes
    (`nn.Partitioned`, `nnx.Param`) that add a last attribute `value` to the path at `init` and not
    at `update`. Haliax and others wrap each array in a node without keys, which adds a last index
    0. Both are dropped, so that a rule sees one name; the index of an array in a list is a part of
    its name.

    `optax.masked` and `optax.partition` hide leaves behind a placeholder, Equinox behind None.
    """
    nodes = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda node: is_hidden(node) or wraps_one_array(node)
    )
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, node in nodes
        for leaf in jax.tree.leaves(node, is_leaf=is_hidden)
    ]


def of_shapes(function: Callable[..., T]) -> Callable[..., T]:
    """A decorator for functions of a tree that look at its structure and its types alone.

    Results are kept, because they are asked for many times while a step is traced. The tree comes
    first, and all other arguments have a hash.
    """
    kept: dict[Any, Any] = {}

    @functools.wraps(function)
    def of_tree(tree: Any, *others: Any) -> T:
        leaves, structure = jax.tree.flatten(tree)
        types = [(np.shape(leaf), getattr(leaf, "dtype", None)) for leaf in leaves]
        key = structure, tuple(types), *others
        try:
            if key in kept:
                return kept[key]
        except TypeError:  # the tree has static data without a hash
            return function(tree, *others)
        if len(kept) >= KEPT:
            kept.clear()
        kept[key] = function(tree, *others)
        return kept[key]

    return of_tree


@of_shapes
def leaf_names(tree: Any) -> list[str]:
    """The name of each leaf, in the order of `jax.tree.leaves`."""
    return [name for name, leaf in named_leaves(tree) if not is_hidden(leaf)]


def is_hidden(node: Any) -> bool:
    """Whether `node` stands where a leaf is hidden from an optimizer."""
    return node is None or isinstance(node, optax.MaskedNode)


def is_placeholder(node: Any) -> bool:
    """Whether `node` is an object of optax in the place of parameters.

    It is a masked leaf, or the placeholder that `optax.tree.map_params` gives to `init`.
    """
    return type(node).__module__.split(".")[0] == "optax"


def has_placeholders(params: Any) -> bool:
    """Whether unknown other parameters may be behind a placeholder of optax."""
    return any(map(is_placeholder, jax.tree.leaves(params, is_leaf=is_placeholder)))


def stands_for_all(params: Any) -> bool:
    """Whether `params` is the placeholder that `optax.tree.map_params` gives to `init`."""
    return is_placeholder(params) and not is_hidden(params) and not jax.tree.leaves(params)


def is_function(node: Any) -> TypeGuard[Callable[..., Any]]:
    """Whether `node` is a function, and not a module of Equinox: a tree that can be called."""
    return callable(node) and jax.tree_util.all_leaves([node])


def wraps_one_array(node: Any) -> bool:
    """Whether a node is there for one array alone: a box of Flax, or a named array of Haliax."""
    # The nodes of Python have keys of their own. To see that here takes the least time.
    if isinstance(node, dict | list | tuple) or jax.tree_util.all_leaves([node]):
        return False
    children = inside(node)
    if len(children) != 1:
        return False
    path, child = children[0]
    is_wrapper = is_box(node) or isinstance(path[-1], FlattenedIndexKey)
    is_leaf = is_hidden(child) or jax.tree_util.all_leaves([child])
    return is_wrapper and (is_leaf or wraps_one_array(child))


def inside(node: Any) -> list[tuple[Any, Any]]:
    """What is directly inside of a node, with the path to it."""
    return jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda x: x is not node)


def is_box(node: Any) -> bool:
    """Whether `node` is a box of Flax around one array."""
    inner = (GetAttrKey("value"),)
    return _is_of_flax(type(node)) and [path for path, _ in inside(node)] == [inner]


@functools.cache
def _is_of_flax(kind: type) -> bool:
    modules = [base.__module__ for base in kind.__mro__]
    return any(module.startswith(("flax.core.meta", "flax.nnx")) for module in modules)


def broadcast_prefix(
    name: str,
    prefix: Any,
    params: Any,
    is_leaf: Callable[[Any], bool] = lambda node: False,
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

    def entries(prefix: Any, node: Any) -> list[Any]:
        if is_hidden(node):
            return []
        if is_leaf(prefix) or jax.tree_util.all_leaves([prefix]):
            return [prefix] * len(jax.tree.leaves(node))
        if jax.tree_util.all_leaves([node]):
            raise ValueError(f"{prefix!r} stands where the parameters have one array.")
        children, structure = jax.tree.flatten(node, is_leaf=lambda child: child is not node)
        pairs = zip(structure.flatten_up_to(prefix), children, strict=True)
        return [entry for subtree, child in pairs for entry in entries(subtree, child)]

    try:
        return entries(prefix, params)
    except ValueError as error:
        raise ValueError(
            f"{name} must have the tree structure of the parameters or be a prefix of it: {error}"
        ) from None
