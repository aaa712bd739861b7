"""The leaves of the trees that meet in one update, side by side and checked."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from optax_largebatch.norms import varying_axes
from optax_largebatch.params.paths import is_placeholder, leaf_names, path_name


@dataclasses.dataclass(frozen=True)
class Leaves:
    """The parameters that an update is about; `tree` gives the structure and the order.

    `tree` is the parameters, or the gradients where a transformation needs no parameters.
    """

    tree: Any
    treedef: Any
    arrays: list[Any]

    def align(self, name: str, tree: Any) -> list[Any]:
        """The parts of another tree that stand at these leaves (None may stand there)."""
        try:
            return self.treedef.flatten_up_to(tree)
        except ValueError as error:
            raise ValueError(
                f"{name} must have the tree structure of the parameters given to `init`: {error}"
            ) from None

    def rebuild(self, leaves: list[Any]) -> Any:
        """A tree of this structure."""
        return self.treedef.unflatten(leaves)


def leaves_of(name: str, tree: Any) -> Leaves:
    """The leaves of `tree`, after checking that they can be optimized.

    Args:
        name: what the tree is, for messages.
        tree: parameters or gradients.

    Returns:
        The leaves.

    Raises:
        TypeError: a leaf is no array of floating point numbers.
        ValueError: `params` has no leaf at all (and no placeholder of optax).
    """
    if tree is None:
        raise ValueError(f"{name} must be a tree of arrays, got None.")
    keyed, treedef = jax.tree_util.tree_flatten_with_path(tree)
    placeholders = jax.tree.leaves(tree, is_leaf=is_placeholder)
    if name == "params" and not keyed and not any(map(is_placeholder, placeholders)):
        raise ValueError(
            f"params must hold at least one array, got the empty tree {tree!r}. Pass the "
            "parameters themselves, for example variables['params'] or nnx.state(model, nnx.Param)."
        )
    for path, leaf in keyed:
        dtype = getattr(leaf, "dtype", None)
        if isinstance(leaf, float):
            continue
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            what = f"a leaf of type {type(leaf).__name__}" if dtype is None else f"dtype {dtype}"
            raise TypeError(
                f"{name} must hold floating point arrays; {path_name(tree, path)!r} has {what}. "
                "Leave it out (equinox: eqx.filter(model, eqx.is_inexact_array)) or hide it with "
                "optax.masked."
            )
    return Leaves(tree, treedef, [jnp.asarray(leaf) for _, leaf in keyed])


def gradients_of(updates: Any, params: Any) -> tuple[Leaves, list[Any]]:
    """The leaves of an update and the gradient of each.

    Args:
        updates: the gradients; None may stand in the place of a leaf that has none.
        params: the parameters, or None.

    Returns:
        The leaves of the parameters (of the gradients, if `params` is None), and for each its
        gradient or None.

    Raises:
        TypeError: a parameter or gradient is no array of floating point numbers.
        ValueError: the two trees differ in structure or shapes; or, inside `jax.shard_map`, a
            gradient differs between devices where its parameter does not.
    """
    checked = leaves_of("updates", updates)
    if params is None:
        return checked, list(checked.arrays)
    leaves = leaves_of("params", params)
    gradients = leaves.align("updates", updates)
    for index, (gradient, param) in enumerate(zip(gradients, leaves.arrays, strict=True)):
        if gradient is None:
            continue
        gradients[index] = jnp.asarray(gradient)
        if gradients[index].shape != param.shape:
            raise ValueError(
                "updates must have the shapes of the parameters; "
                f"{leaf_names(params)[index]!r} has a gradient of shape "
                f"{gradients[index].shape} and a parameter of shape {param.shape}."
            )
        unreduced = varying_axes(gradients[index]) - varying_axes(param)
        if unreduced:
            axes = ", ".join(map(repr, sorted(unreduced)))
            raise ValueError(
                f"updates must be reduced over the mesh axis {axes}: along it the gradient of "
                f"{leaf_names(params)[index]!r} differs between devices and its parameter "
                f"does not. Call jax.lax.pmean(grads, {axes}) first."
            )
    return leaves, gradients
