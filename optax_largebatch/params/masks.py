"""Masks: which parameters a transformation touches, in all forms that users may write."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from optax_largebatch.params import paths
from optax_largebatch.params.rules import Rule, listed

Mask = Rule | Callable[[Any], Any] | Any
"""None (all leaves), a rule, a function of the parameters, or a tree (or prefix) of booleans.

A mask that selects nothing is an error, unless it is a function that returns False."""


def check_mask(name: str, mask: Mask) -> None:
    """Checks, when an optimizer is built, that `mask` can be a mask.

    A single boolean is refused, because `optax.inject_hyperparams` makes one from a mask function
    that it takes for a schedule.

    Args:
        name: the argument's name, for the message.
        mask: the mask.

    Raises:
        TypeError: `mask` is a single boolean, number, string or array.
    """
    if isinstance(mask, bool | np.bool_ | int | float | str | np.ndarray | jax.Array):
        raise TypeError(
            f"{name} must be None (every parameter), a rule such as ~matching_kinds('bias', "
            f"'norm'), a function of the parameters, or a tree of booleans; got {mask!r}. To "
            "select nothing, pass a function that returns False. If you passed a function through "
            "optax.inject_hyperparams, it was called as a schedule: name it in "
            f"static_args=({name!r},), or pass a rule."
        )


def select_leaves(
    name: str,
    mask: Mask,
    params: Any,
    cure: str = "If that is meant, say `lambda params: False`.",
) -> list[bool]:
    """Like `resolve_mask`, but a mask must select something or be a function that returns False.

    Args:
        name: the argument's name, for messages.
        mask: see `Mask`.
        params: the parameters, or a tree of the same structure.
        cure: what to do where it selects nothing, for the message.

    Returns:
        One Python boolean for each leaf.

    Raises:
        TypeError: a leaf of the mask is no boolean.
        ValueError: the mask selects nothing, is no prefix of `params`, or a pattern of the rule
            matches nothing.
    """
    choices = resolve_mask(name, mask, params)
    # `optax.partition` gives several optimizers one mask, which may be meant for hidden parameters.
    if any(choices) or not choices or paths.has_placeholders(params):
        return choices
    if paths.is_function(mask) and mask(params) is False:
        return choices
    raise ValueError(
        f"{name}: {mask!r} selects no parameter. {cure} The names are: "
        f"{listed(paths.leaf_names(params))}."
    )


def resolve_mask(name: str, mask: Mask, params: Any) -> list[bool]:
    """The mask's choice for each leaf of `params`, in the order of `jax.tree.leaves`.

    Args:
        name: the argument's name, for messages.
        mask: see `Mask`.
        params: the parameters, or a tree of the same structure.

    Returns:
        One Python boolean for each leaf.

    Raises:
        TypeError: a leaf of the mask is no boolean.
        ValueError: the mask is no prefix of `params`, or a pattern of the rule matches nothing.
    """
    if mask is None:
        return [True] * len(jax.tree.leaves(params))
    if isinstance(mask, Rule):
        try:
            return jax.tree.leaves(mask.mask(params))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    tree = mask(params) if paths.is_function(mask) else mask
    for choice in jax.tree.leaves(tree):
        if not isinstance(choice, bool | np.bool_):
            raise TypeError(
                f"{name} must hold Python booleans, which are known when the step is traced; "
                f"it holds {choice!r} of type {type(choice).__name__}."
            )
    return [bool(choice) for choice in paths.broadcast_prefix(name, tree, params)]
