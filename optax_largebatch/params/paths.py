"""Names of parameters: the same string for the same leaf in every framework."""

from typing import Any

import jax
import optax


def path_name(path: tuple[Any, ...]) -> str:
    """The name of a leaf, as in `"encoder/dense/kernel"`.

    Flax wraps leaves in boxes (`nn.Partitioned`, `nnx.Param`) that add a last attribute `value`
    to the path at `init` and not at `update`; it is dropped, so that a rule sees one name.

    Args:
        path: a key path, as `jax.tree_util.tree_flatten_with_path` gives it.

    Returns:
        The keys joined by `/`.
    """
    if path and path[-1] == jax.tree_util.GetAttrKey("value"):
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """`(name, leaf)` for each leaf of a tree; leaves that `optax.masked` hid are included."""
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_masked)[0]
    return [(path_name(path), leaf) for path, leaf in leaves]


def is_masked(node: Any) -> bool:
    """Whether `node` stands where `optax.masked` or `optax.partition` hid a leaf."""
    return isinstance(node, optax.MaskedNode)


def is_placeholder(node: Any) -> bool:
    """Whether `node` is an object of optax in the place of parameters.

    That is a masked leaf, or what `optax.tree.map_params` initialises an optimizer with.
    """
    return type(node).__module__.split(".")[0] == "optax"
