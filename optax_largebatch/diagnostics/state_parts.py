"""Parts of an optimizer's state, found by their fields through any nesting."""

from collections.abc import Mapping, Sequence
import math
from typing import Any, NamedTuple

import jax

from optax_largebatch.arguments import Bounds
from optax_largebatch.params.owners import Keys, Part, parts_of, seen_by
from optax_largebatch.params.paths import leaf_names
from optax_largebatch.params.stacked import NOT_STACKED, Stacked


class About(NamedTuple):
    """What an optimizer says about the trust ratios in a part of its state."""

    numbers: list[int]
    """The numbers of their parameters among `jax.tree.leaves(params)`."""
    axes: list[tuple[int, ...]]
    """The stacked axes of each of these parameters."""
    adapted: list[bool]
    """Whether each of them is adapted."""
    bounds: Bounds
    """The bounds on a ratio."""


def parts(state: Any, *kinds: type[tuple[Any, ...]]) -> list[Part]:
    """The parts of a state that are of the given kinds, in order.

    Args:
        state: the state, or an object that holds one, such as an `nnx.Optimizer`.
        *kinds: the NamedTuples to look for. A dictionary with exactly their fields counts too.

    Returns:
        The parts, each with the `kind` that it is of.
    """
    return [
        part._replace(kind=kind) for part in parts_of(state) for kind in kinds if _is(part, kind)
    ]


class OfParameter(NamedTuple):
    """The entries of a vector of blocks that belong to one parameter."""

    part: Part
    number: int
    """The number of the parameter among `jax.tree.leaves(params)`."""
    name: str
    """The name of the parameter, after the name of its part if there are several parts."""
    entries: slice
    shape: tuple[int, ...]
    """The lengths of the parameter's stacked axes."""
    axes: tuple[int, ...]
    """The stacked axes."""
    adapted: bool
    """Whether the parameter is adapted; True if no optimizer was asked."""


def by_parameter(
    found: Sequence[Part],
    field: str,
    state: Any,
    params: Any,
    stacked: Stacked = NOT_STACKED,
    *,
    others: int = 0,
) -> list[OfParameter]:
    """The parameters to which the entries of vectors with a number for each block belong.

    Args:
        found: parts of the state.
        field: the vector.
        state: the state.
        params: the parameters.
        stacked: the stacks among them, for parts that no optimizer has said anything about.
        others: entries at the end that belong to no block.

    Returns:
        The entries of each parameter, part by part.

    Raises:
        ValueError: the state does not belong to these parameters, or is that of many models.
    """
    leaves, names = jax.tree.leaves(params), leaf_names(params)
    all_axes, sizes = stacked.axes(params), stacked.sizes(params)
    abouts = []
    for part in found:
        blocks = check_one_model(field, part.array(field), ndim=1).size - others
        about = part.about
        if about is None:
            whole = sum(sizes) == blocks
            numbers = list(range(len(leaves))) if whole else seen_by(part, state, params)
            own_axes = [all_axes[number] for number in numbers]
            about = About(numbers, own_axes, [True] * len(numbers), None)
        columns = zip(about.numbers, about.axes, strict=True)
        expected = sum(math.prod(_lengths(leaves[number], axes)) for number, axes in columns)
        if expected != blocks:
            raise ValueError(
                f"the state holds the {field.replace('_', ' ')} of {blocks} blocks, and params "
                f"have {expected if part.about else sum(sizes)}. Pass the parameters of the "
                "optimizer, and its `stacked` where that is asked for."
            )
        abouts.append(about)
    results = []
    for part, about in zip(found, abouts, strict=True):
        start = 0
        for number, axes, adapted in zip(about.numbers, about.axes, about.adapted, strict=True):
            pairs = zip(found, abouts, strict=True)
            several = [one for one, own in pairs if number in own.numbers]
            prefix = labels([one.keys for one in several])[several.index(part)]
            name = f"{prefix}/{names[number]}" if prefix else names[number]
            shape = _lengths(leaves[number], axes)
            entries = slice(start, start + math.prod(shape))
            results.append(OfParameter(part, number, name, entries, shape, axes, adapted))
            start = entries.stop
    return results


def labels(places: Sequence[Keys]) -> list[str]:
    """Names for several places in a state: the keys in which they differ; "" for a single place.

    Wrappers around all places, and keys below the last difference, do not change the names.
    """
    heads = {keys[:1] for keys in places}
    if len(places) == 1 or (len(heads) == 1 and () in heads):
        return [""] * len(places)
    names = [""] * len(places)
    for head in heads:
        group = [index for index, keys in enumerate(places) if keys[:1] == head]
        below = labels([places[index][1:] for index in group])
        for index, name in zip(group, below, strict=True):
            own = (*(head if len(heads) > 1 else ()), *([name] if name else []))
            names[index] = "/".join(own)
    return names


def check_one_model(name: str, array: jax.Array, ndim: int) -> jax.Array:
    """An array of a state, after checking that the state is that of a single model.

    Raises:
        ValueError: it has a first axis for models of `jax.vmap` or copies of `jax.pmap`.
    """
    if array.ndim != ndim:
        raise ValueError(
            f"the state's {name} has the shape {array.shape}, with an axis for the copies of "
            "jax.pmap or the models of jax.vmap. Pass one of them, as in "
            "jax.tree.map(lambda x: x[0], (state, params)), or map over them with jax.vmap."
        )
    return array


def _lengths(leaf: Any, axes: tuple[int, ...]) -> tuple[int, ...]:
    """The lengths of some axes."""
    return tuple(leaf.shape[axis] for axis in axes)


def _is(part: Part, kind: type[tuple[Any, ...]]) -> bool:
    """Whether a part is of a kind."""
    return part.has_fields_of(kind) if issubclass(part.kind, Mapping) else part.kind is kind
