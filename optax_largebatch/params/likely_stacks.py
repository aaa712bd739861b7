"""Parameters that look like stacks of layers and are not declared as such, and warnings of them."""

from collections.abc import Iterable, Sequence
import itertools
import math
import re
from typing import Any, NamedTuple
import warnings

import jax
import numpy as np

from optax_largebatch.params.blocks import Block
from optax_largebatch.params.names import is_called
from optax_largebatch.params.paths import leaf_names
from optax_largebatch.params.patterns import patterns_of
from optax_largebatch.params.shapes import Axes, Shape
from optax_largebatch.params.stacked import Stacked

LARGEST_TOY = 64
"""So many numbers in one vector, and no more, are no network."""


class LikelyStack(NamedTuple):
    """A parameter that looks like a stack of layers."""

    number: int
    """The number of the parameter among `jax.tree.leaves(params)`."""
    name: str
    shape: Shape
    axis: int
    """The axis that seems to run over layers."""
    neighbour: str
    """The name of a declared stack of the same module; empty if there is none."""
    pattern: str
    """A pattern for `stacked_layers` that declares the parameter."""

    @property
    def entry(self) -> str:
        """Code for its entry in the argument of `stacked_layers`."""
        return f"{self.pattern!r}: {self.axis}"


def likely_stacks(params: Any, declared: Sequence[Axes]) -> list[LikelyStack]:
    """The parameters that look like stacks and are not declared: layers, and experts.

    Args:
        params: the parameters, or their shapes.
        declared: the stacked axes of each leaf that are declared.
    """
    names = leaf_names(params)
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(params)]
    layers = _layers(names, shapes, declared)
    stacks = [{*axes} for axes in declared]
    for layer in layers:
        stacks[layer.number].add(layer.axis)
    blocks = list(map(Block.of, names, shapes, map(tuple, stacks)))
    experts = _axes_of_experts(blocks)
    for axis in sorted({*experts.values()}):
        numbers = [number for number in sorted(experts) if experts[number] == axis]
        layers += [
            LikelyStack(number, names[number], shapes[number], axis, "", pattern)
            for pattern in patterns_of(names, numbers)
            for number in numbers
            if re.search(pattern, names[number])
        ]
    return layers


def _layers(
    names: list[str],
    shapes: list[Shape],
    declared: Sequence[Axes],
) -> list[LikelyStack]:
    """The parameters that seem to be stacked along an axis with all others of a module.

    All parameters of a module that is stacked have the stacked axis, biases and scales too. So a
    module looks stacked if all its parameters have equally many layers along one axis, and

    - one of them is declared with this axis; or
    - it is their first or second axis, and the smallest have two axes and the largest more:
      elsewhere a module with large kernels has biases or scales with a single axis; or
    - it is their first or second axis, the smallest have three axes, and the module is called
      `layers`, `blocks` or the like.
    """
    modules: dict[str, list[int]] = {}
    paths = [name.split("/") for name in names]
    for depth in range(max(map(len, paths), default=0)):
        for number, path in enumerate(paths):
            if depth < len(path):
                modules.setdefault("/".join(path[:depth]), []).append(number)
    stacks: dict[int, LikelyStack] = {}
    for module, members in modules.items():
        of_members = [shapes[number] for number in members]
        called = [names[number] for number in members]
        known = sorted({axis for number in members for axis in declared[number]})
        for axis in known or _stacked_axis(module, called, of_members):
            if not _is_shared(axis, of_members) or of_members[0][axis] == 1:
                continue
            neighbour = next((names[n] for n in members if axis in declared[n]), "")
            innermost = _module_of_all(called)
            for number in members:
                name = names[number]
                shape = shapes[number]
                if is_called("router", name) and len(shape) == 2 + len(declared[number]):
                    continue  # it has an output for each of the experts beside it
                if axis in declared[number] or number in stacks:
                    continue
                pattern = f"^{re.escape(name)}$"
                if innermost and not neighbour:
                    pattern = _of_module(innermost)
                stacks[number] = LikelyStack(number, name, shape, axis, neighbour, pattern)
    return [stacks[number] for number in sorted(stacks)]


def _module_of_all(names: Sequence[str]) -> str:
    """The innermost module that all are in, with a slash behind it."""
    keys = zip(*(name.split("/")[:-1] for name in names), strict=False)
    shared = itertools.takewhile(lambda of_names: len({*of_names}) == 1, keys)
    return "".join(f"{key}/" for key, *_ in shared)


def _is_shared(axis: int, shapes: Iterable[Shape]) -> bool:
    """Whether all have this axis, with one length."""
    lengths = {shape[axis : axis + 1] for shape in shapes}
    return len(lengths) == 1 and () not in lengths


def _stacked_axis(
    module: str,
    names: Sequence[str],
    shapes: Sequence[Shape],
) -> list[int]:
    """The axis along which the parameters of a module seem to be stacked, if there is one.

    Of two axes it is the shorter one: there are fewer layers than channels. Kernels share their
    second axis in other modules too. So along it, what has two axes must be a bias or a scale, and
    none of attention, which may have as many heads as channels in each. Queries of attention by
    themselves may have as many heads as inputs. The layers of a list are no stack.
    """
    ndims = list(map(len, shapes))
    is_stack = min(ndims) == 2 < max(ndims)
    if min(ndims) == 3:
        is_stack = is_called("stack", module)
    keys = {name.removeprefix(f"{module}/").split("/")[0] for name in names}
    are_layers = len(keys) > 1 and all(map(str.isdigit, keys))
    is_of_heads = is_called("heads of inputs", module.rpartition("/")[2])
    has_kernels = not all(is_called("vector", name) for name in names)
    if not is_stack or not has_kernels or are_layers or is_of_heads:
        return []
    of_two_axes = [name for name, ndim in zip(names, ndims, strict=True) if ndim == 2]
    may_be_second = all(
        is_called("vector", name) and not is_called("heads of inputs", name) for name in of_two_axes
    )
    axes = [0, 1] if may_be_second else [0]
    shared = [axis for axis in axes if _is_shared(axis, shapes)]
    return sorted(shared, key=lambda axis: shapes[0][axis])[:1]


def _axes_of_experts(blocks: Sequence[Block]) -> dict[int, int]:
    """The axis of the experts of a module, whose router has an output for each of them.

    Args:
        blocks: of all parameters, without the axes that run over layers.
    """
    axes: dict[int, int] = {}
    for router in blocks:
        if not is_called("router", router.name) or len(router.shape) != 2:
            continue
        is_turned = is_called("outputs first", router.name)
        experts = min(router.shape) if is_turned else router.shape[1]
        module = re.sub(r"[^/]+(/(kernel|w|weight))?$", "", router.name)
        candidates = {
            number: block.axes[0]
            for number, block in enumerate(blocks)
            if block.name.startswith(module)
            and len(block.shape) == 3
            and block.shape[0] == experts > 1
        }
        if len(candidates) > 1:  # one alone may be attention's outputs, with a gate for each head
            axes |= candidates
    return axes


def _of_module(name: str) -> str:
    """A pattern of all that is in a module. Dots of `layers.0` may stay: they match themselves."""
    return re.escape(name) if re.search(r"[^\w./~-]", name) else name


def declaration(entries: Iterable[str]) -> str:
    """Code that declares stacks by their entries."""
    return f"stacked_layers({{{', '.join(dict.fromkeys(entries))}}})"


def forgotten(stacked: Stacked, params: Any) -> list[LikelyStack]:
    """The parameters that look like stacks, where nobody has said whether they are."""
    if stacked.if_forgotten == "nothing":
        return []
    said = stacked.entries.of(params)
    # At the root, a network of few parameters has lengths that are equal by chance.
    return [
        stack
        for stack in likely_stacks(params, stacked.axes(params))
        if () not in said[stack.number]
        and (not stack.neighbour or stack.name.split("/")[0] == stack.neighbour.split("/")[0])
    ]


def check_none_forgotten(stacked: Stacked, params: Any) -> None:
    """Warns, or raises, if some parameters look like stacks, and nobody has said whether."""
    stacks = forgotten(stacked, params)
    if not stacks:
        return
    first = stacks[0]
    message = (
        f"{len({stack.number for stack in stacks})} of {len(leaf_names(params))} parameters look "
        f"like stacks of layers, such as {first.name!r} of shape {first.shape}, and "
        f"stacked={stacked} does not declare them. Each would count as one layer, or as no "
        "matrix, and a stack of biases as a matrix. Declare them: "
        f"stacked={declaration(stack.entry for stack in stacks)}. If one is no stack, say so by "
        f"None in place of the axis: {{{first.pattern!r}: None}}."
    )
    if stacked.if_forgotten == "error":
        raise ValueError(message)
    warnings.warn(message, stacklevel=2)


def check_not_flat(stacked: Stacked, params: Any) -> None:
    """Warns if a whole network seems to lie in one vector."""
    if stacked.if_forgotten == "nothing" or not jax.tree_util.all_leaves([params]):
        return
    shape = np.shape(params)
    if len(shape) == 1 and math.prod(shape) > LARGEST_TOY:
        warnings.warn(
            f"the parameters are one vector of {math.prod(shape)} numbers, as after optax.flatten "
            "or ravel_pytree, so all layers have one norm. Pass the tree of the network. If the "
            "vector is one layer, say so: stacked={}.",
            stacklevel=3,
        )
