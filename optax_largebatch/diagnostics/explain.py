"""Explains what an optimizer will do with each parameter, before the first step."""

import dataclasses
import math
import re
from typing import Any

import jax
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np

from optax_largebatch.arguments import check_flag
from optax_largebatch.params.groups import ParamGroups, check_groups
from optax_largebatch.params.likely_stacks import declaration, likely_stacks
from optax_largebatch.params.masks import Mask, check_mask, resolve_mask
from optax_largebatch.params.paths import leaf_names
from optax_largebatch.params.stacked import Stacks, check_stacked

LONGEST_CELL = 200
"""A longer name loses its middle, since all rows are as wide as the widest."""


@dataclasses.dataclass(frozen=True)
class ExplainedParameter:
    """One line of an `Explanation`."""

    name: str
    shape: tuple[int, ...]
    blocks: int
    """The number of layers in the parameter, each with a norm of its own; 1 if it stacks none."""
    decayed: bool
    adapted: bool
    group: str
    """The rule of the parameter's group; empty without a group."""
    undeclared: str = ""
    """If the parameter looks like a stack of layers that is not declared, the entry for it in the
    argument of `stacked_layers`, such as `'layers/': 0`; otherwise empty."""
    caught: str = ""
    """Why the parameter should not be on a sphere, if it was asked about; otherwise empty."""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The result of `explain`: print it, or read its `parameters`."""

    parameters: tuple[ExplainedParameter, ...]

    def __str__(self) -> str:
        head = ("parameter", "shape", "blocks", "decayed", "adapted", "group")
        lines = [
            (
                _cell(one.name),
                "x".join(map(str, one.shape)) or "scalar",
                f"{one.blocks}{'?' if one.undeclared else ''}",
                "yes" if one.decayed else "-",
                ("yes!" if one.caught else "yes") if one.adapted else "-",
                _cell(one.group) or "-",
            )
            for one in self.parameters
        ]
        widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
        rows = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in (head, *lines)
        ]
        return "\n".join([*rows, self.summary(), *self._notes()])

    def _notes(self) -> list[str]:
        """What the marks mean."""
        caught: dict[str, list[str]] = {}
        for one in self.parameters:
            if one.caught:
                caught.setdefault(one.caught, []).append(printable(one.name))
        notes = [f"!: {reason}: {', '.join(names)}" for reason, names in caught.items()]
        if notes:
            notes.append('   Leave them out by the mask: at_least_ndim(2) & excluding("embed").')
        marked = [one for one in self.parameters if one.undeclared]
        if not marked:
            return notes
        looks = (
            "parameter looks like a stack" if len(marked) == 1 else "parameters look like stacks"
        )
        return [
            *notes,
            f"?: {len(marked)} {looks} of layers, and each layer needs a norm of its own:",
            f"   stacked={declaration(one.undeclared for one in marked)}",
        ]

    def summary(self) -> str:
        """The count of numbers that are decayed and adapted."""
        sizes = [math.prod(one.shape) for one in self.parameters]
        decayed = sum(n for n, one in zip(sizes, self.parameters, strict=True) if one.decayed)
        adapted = sum(n for n, one in zip(sizes, self.parameters, strict=True) if one.adapted)
        return (
            f"{len(sizes)} parameters, {sum(one.blocks for one in self.parameters)} blocks, "
            f"{sum(sizes)} numbers: {decayed} decayed, {adapted} adapted"
        )


def explain(
    params: Any,
    *,
    weight_decay_mask: Mask = None,
    trust_ratio_mask: Mask = None,
    groups: ParamGroups | None = None,
    stacked: Stacks = None,
    hyperball: bool = False,
) -> Explanation:
    r"""Says for each parameter whether it is decayed and adapted, and how many blocks it has.

    Pass the same arguments as to the optimizer. A block shares one norm: it is an array, or one
    layer of an array that stacks layers. Parameters that look like stacks and are not declared with
    `stacked` have a question mark after their number of blocks: all parameters of their module have
    equally long first axes, and even its biases and scales have two axes.

    Args:
        params: the parameters, or their shapes from `jax.eval_shape`.
        weight_decay_mask: the parameters that are decayed; None for all.
        trust_ratio_mask: the parameters that are adapted; None for all.
        groups: what `param_groups` returned; None for no groups.
        stacked: what `stacked_layers` returned; None for no stacks.
        hyperball: True if the adapted parameters stay on spheres, as under `hyperball`. Those that
            should not, because they are vectors, embeddings, start at zero or have a low precision,
            then have an exclamation mark.

    Returns:
        An `Explanation`, to be printed.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a pattern matches no parameter, or a tree has another structure.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import excluding_kinds, explain, stacked_layers
        >>> params = {"head": jnp.ones((4, 2)), "layers": {"bias": jnp.ones((3, 4))}}
        >>> print(explain(
        ...     params, weight_decay_mask=excluding_kinds("bias", "norm"),
        ...     stacked=stacked_layers({"layers/": 0})))
        parameter    shape  blocks  decayed  adapted  group
        head         4x2    1       yes      yes      -
        layers/bias  3x4    3       -        yes      -
        2 parameters, 4 blocks, 20 numbers: 8 decayed, 20 adapted
    """
    check_mask("weight_decay_mask", weight_decay_mask)
    check_mask("trust_ratio_mask", trust_ratio_mask)
    stacks = check_stacked(stacked)
    groups = check_groups(groups, stacked)
    blocks = stacks.blocks(params)
    likely = {one.number: one.entry for one in likely_stacks(params, stacks.axes(params))}
    names = leaf_names(params)
    check_flag("hyperball", hyperball)
    adapted = resolve_mask("trust_ratio_mask", trust_ratio_mask, blocks)
    caught = [""] * len(names)
    if hyperball:
        own = zip(names, jax.tree.leaves(params), jax.tree.leaves(blocks), adapted, strict=True)
        caught = [_caught(name, x, np.ndim(block)) if yes else "" for name, x, block, yes in own]
    columns = zip(
        names,
        [tuple(leaf.shape) for leaf in jax.tree.leaves(params)],
        stacks.sizes(params),
        resolve_mask("weight_decay_mask", weight_decay_mask, blocks),
        adapted,
        ["" if index < 0 else str(groups.rules[index]) for index in groups.indices(params)],
        [likely.get(number, "") for number in range(len(names))],
        caught,
        strict=True,
    )
    return Explanation(tuple(ExplainedParameter(*line) for line in columns))


def _caught(name: str, param: Any, ndim: int) -> str:
    """Why a parameter should not stay on a sphere; empty if it may."""
    is_known = not isinstance(param, jax.ShapeDtypeStruct | Tracer)
    if is_known and not np.any(np.asarray(param, "float32")):
        return "starts at zero, and would stay there"
    if ndim < 2:
        return "has one axis: its norm could not change"
    if re.search("embed", name, re.IGNORECASE):
        return "is an embedding: the norm of all its rows together could not change"
    if jnp.finfo(param.dtype).bits < 32:
        return f"is {param.dtype}: most of a step is rounded away without master_weights"
    return ""


def printable(text: str) -> str:
    """The text with escapes, as `repr` writes them, for characters that a terminal acts on."""
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def _cell(text: str) -> str:
    shown, half = printable(text), LONGEST_CELL // 2
    return shown if len(shown) <= LONGEST_CELL else f"{shown[: half - 3]}...{shown[-half:]}"
