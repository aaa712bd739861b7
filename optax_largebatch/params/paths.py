"""Names of parameters, the same in every framework, and trees with an entry for each of them."""

from collections.abc import Callable
import functools
from typing import Any, ParamSpec, TypeGuard, TypeVar

import jax
from jax.tree_util import FlattenedIndexKey, GetAttrKey
import numpy as np
import optax

P = ParamSpec("P")
T = TypeVar("T")

Named = list[tuple[str, Any]]
"""Leaves with their names."""

KEPT = 64
"""For how many trees a function keeps its result."""


def path_name(tree: Any, path: tuple[Any, ...]) -> str:
    """The name of a leaf, as in `"encoder/dense/kernel"`.

    Flax wraps leaves in boxes (`nn.Partitioned`, `nnx.Param`) that add a last attribute `value`
    to the path at `init` and not at `update`. Haliax and others wrap each array in a node without
    keys, which adds a last index 0. Both are dropped, so that a rule sees one name; the index of an
    array in a list is a part of its name.

    Args:
        tree: the tree that holds the leaf.
        path: its key path, as `jax.tree_util.tree_flatten_with_path` gives it.

    Returns:
        The keys joined by `/`.
    """
    while path and (path[-1] == GetAttrKey("value") or isinstance(path[-1], FlattenedIndexKey)):
        if not wraps_one_array(_node_at(tree, path[:-1])):
            break
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: Any) -> Named:
    """`(name, leaf)` for each leaf of a tree and for each place where one is hidden.

    `optax.masked` and `optax.partition` hide leaves behind a placeholder, Equinox behind None.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_hidden)
    return [(path_name(tree, path), leaf) for path, leaf in leaves]


def of_shapes(function: Callable[P, T]) -> Callable[P, T]:
    """A decorator for functions of a tree that look at its structure and its types alone.

    Results are kept, because they are asked for many times while a step is traced. The tree comes
    first, and all other arguments have a hash.
    """
    kept: dict[Any, Any] = {}

    @functools.wraps(function)
    def of_tree(*args: P.args, **kwargs: P.kwargs) -> T:
        tree, *others = args
        leaves, structure = jax.tree.flatten(tree)
        types = [(np.shape(leaf), getattr(leaf, "dtype", None)) for leaf in leaves]
        key = structure, tuple(types), *others
        try:
            if key in kept:
                return kept[key]
        except TypeError:  # the tree has static data without a hash
            return function(*args, **kwargs)
        if len(kept) >= KEPT:
            kept.clear()
        kept[key] = function(*args, **kwargs)
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
    children = inside(node)
    if len(children) != 1 or not children[0][0]:  # a node of several, or an array
        return False
    path, child = children[0]
    has_no_keys = isinstance(path[-1], FlattenedIndexKey)
    return is_box(node) or (has_no_keys and len(jax.tree.leaves(child, is_leaf=is_hidden)) == 1)


def _node_at(tree: Any, path: tuple[Any, ...]) -> Any:
    """The node at a path."""
    for key in path:
        tree = dict(inside(tree))[(key,)]
    return tree


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
