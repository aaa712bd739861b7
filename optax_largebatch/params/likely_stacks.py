"""Parameters that look like stacks of layers, and are not declared as such."""

from collections.abc import Iterable, Sequence
import re
from typing import Any, NamedTuple

import jax
import numpy as np

from optax_largebatch.params.paths import leaf_names

_NAMES_OF_STACKS = re.compile(r"layers|blocks|experts|layer_stack|.*scan.*", re.IGNORECASE)


class LikelyStack(NamedTuple):
    """A parameter that looks like a stack of layers."""

    number: int
    """The number of the parameter among `jax.tree.leaves(params)`."""
    name: str
    shape: tuple[int, ...]
    axis: int
    """The axis that seems to run over layers."""
    beside: str
    """The name of a declared stack of the same module; empty if there is none."""
    pattern: str
    """A pattern for `stacked_layers` that declares the parameter."""

    @property
    def entry(self) -> str:
        """Code for its entry in the argument of `stacked_layers`."""
        return f"{self.pattern!r}: {self.axis}"


def likely_stacks(params: Any, declared: Sequence[tuple[int, ...]]) -> list[LikelyStack]:
    """The parameters that look like stacks and are not declared, in the order of the leaves.

    All parameters of a module that is stacked have the stacked axis, biases and scales too. So a
    module looks stacked if all its parameters have equally many layers along one axis, and

    - one of them is declared with this axis; or
    - it is their first axis, and the smallest have two axes and the largest more: elsewhere a
      module with large kernels has biases or scales with a single axis; or
    - it is their first axis, the smallest have three axes, and the module is called `layers`,
      `blocks` or the like.

    Args:
        params: the parameters, or their shapes.
        declared: the stacked axes of each leaf that are declared.
    """
    names = leaf_names(params)
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(params)]
    paths = [name.split("/") for name in names]
    modules: dict[str, list[int]] = {}
    for depth in range(max(map(len, paths), default=0)):
        for number, path in enumerate(paths):
            if depth < len(path):
                modules.setdefault("/".join(path[:depth]), []).append(number)
    found: dict[int, LikelyStack] = {}
    for module, members in modules.items():
        known = sorted({axis for number in members for axis in declared[number]})
        for axis in known or [0]:
            lengths = {shapes[n][axis] if axis < len(shapes[n]) else 1 for n in members}
            if len(lengths) > 1 or 1 in lengths:
                continue
            if not known and not _looks_stacked(module, [len(shapes[n]) for n in members]):
                continue
            beside = next((names[n] for n in members if axis in declared[n]), "")
            stack = _common([paths[n][:-1] for n in members])
            for number in members:
                if axis not in declared[number] and number not in found:
                    alone = f"^{re.escape(names[number])}$"
                    pattern = alone if beside or not stack else "/".join([*stack, ""])
                    found[number] = LikelyStack(
                        number, names[number], shapes[number], axis, beside, pattern
                    )
    return [found[number] for number in sorted(found)]


def _common(paths: list[list[str]]) -> list[str]:
    """The names with which all paths begin."""
    first = paths[0]
    return [key for i, key in enumerate(first) if all(x[: i + 1] == first[: i + 1] for x in paths)]


def _looks_stacked(module: str, ndims: list[int]) -> bool:
    """Whether a module looks stacked by the numbers of axes of its parameters."""
    if min(ndims) == 3:
        return bool(_NAMES_OF_STACKS.fullmatch(module.rpartition("/")[2]))
    return min(ndims) == 2 < max(ndims)


def declaration(entries: Iterable[str]) -> str:
    """Code that declares stacks by their entries."""
    return f"stacked_layers({{{', '.join(dict.fromkeys(entries))}}})"
