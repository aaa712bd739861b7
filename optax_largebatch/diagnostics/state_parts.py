"""Parts of an optimizer's state, found by their fields through any nesting.

Parts are found inside the wrappers of this library and of optax, in the boxes of `nnx.Optimizer`,
and in the dictionaries that a checkpoint makes of tuples.
"""

from collections.abc import Iterator, Mapping, Sequence
import math
from typing import Any, NamedTuple

import jax
import optax

from optax_largebatch.arguments import Bounds
from optax_largebatch.params.owners import Keys, children, keyed_arrays, owners, unboxed
from optax_largebatch.params.paths import leaf_names
from optax_largebatch.params.stacked import Stacked


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


class Part(NamedTuple):
    """A part of a state."""

    keys: Keys
    """The keys on the way to the part."""
    kind: type[tuple[Any, ...]]
    """The NamedTuple of the part, or the one that it had before it went through a checkpoint."""
    fields: dict[str, Any]
    masked_at: Keys
    """The keys of the innermost `optax.masked` around the part, or of the state's root."""
    about: About | None = None
    """What the optimizer says about the part, if it was asked."""

    def array(self, field: str) -> jax.Array:
        """A field that is one array."""
        return unboxed(self.fields[field])


def parts(state: Any, *kinds: type[tuple[Any, ...]]) -> list[Part]:
    """The parts of a state that are of the given kinds, in order.

    Args:
        state: the state, or an object that holds one, such as an `nnx.Optimizer`.
        *kinds: the NamedTuples to look for. A dictionary with exactly their fields counts too.
    """
    found = _nodes(state, (), ())
    return [part._replace(kind=kind) for part in found for kind in kinds if _is(part, kind)]


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
    stacked: Stacked,
    *,
    others: int = 0,
    or_pass: str = "",
) -> list[OfParameter]:
    """The parameters to which the entries of vectors with a number for each block belong.

    Args:
        found: parts of the state.
        field: the vector.
        state: the state.
        params: the parameters.
        stacked: the stacks among them, for parts that no optimizer has said anything about.
        others: entries at the end that belong to no block.
        or_pass: what may be passed in the place of `stacked`, for the message.

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
            numbers = list(range(len(leaves))) if whole else _seen(part, state, params)
            own_axes = [all_axes[number] for number in numbers]
            about = About(numbers, own_axes, [True] * len(numbers), None)
        columns = zip(about.numbers, about.axes, strict=True)
        expected = sum(math.prod(_lengths(leaves[number], axes)) for number, axes in columns)
        if expected != blocks:
            raise ValueError(
                f"the state holds the {field.replace('_', ' ')} of {blocks} blocks, and params "
                f"have {expected if part.about else sum(sizes)}. Pass the parameters and the "
                f"`stacked` that the optimizer has{or_pass}; for an optimizer that is behind "
                "optax.masked and keeps no moments, pass the part of both that it sees."
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


def _nodes(node: Any, keys: Keys, masked_at: Keys) -> Iterator[Part]:
    """All nodes of a tree that have others below them."""
    below = children(node)
    if not below:
        return
    if list(below) == list(optax.MaskedState._fields):
        masked_at = keys
    yield Part(keys, type(node), below, masked_at)
    for key, child in below.items():
        yield from _nodes(child, (*keys, key), masked_at)


def _is(part: Part, kind: type[tuple[Any, ...]]) -> bool:
    """Whether a part is of a kind."""
    if issubclass(part.kind, Mapping):
        return set(part.fields) == set(getattr(kind, "_fields", ()))
    return part.kind is kind


def _seen(part: Part, state: Any, params: Any) -> list[int]:
    """The parameters that have moments behind the same mask as a part."""
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
