"""The nodes of an optimizer's state, and which parameter each array and entry of it belongs to.

Both are found by keys, through any nesting: wrappers, the boxes of `nnx.Optimizer`, and the
dictionaries and lists that a checkpoint makes of tuples.

A state holds copies of the tree of parameters: moments, sums, masters. These copies are found by
the keys of the parameters, level by level, wherever they are and whatever is hidden in them.
"""

from collections.abc import Iterator, Mapping, Sequence
import itertools
import math
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from optax_largebatch.params.paths import inside, is_box, leaf_names, wraps_one_array
from optax_largebatch.params.shapes import Shape
from optax_largebatch.params.stacked import NOT_STACKED, Stacked

Keys = tuple[str, ...]
"""The keys on the way to a node of a tree, as strings."""

Kind = type[tuple[Any, ...]]
"""The NamedTuple of a state."""


class StateNode(NamedTuple):
    """A node of a state that has others below it, such as the state of one transformation."""

    keys: Keys
    """The keys on the way to the node."""
    kind: type[Any]
    """The type. A dictionary may have been a NamedTuple before it went through a checkpoint."""
    fields: dict[str, Any]
    """The nodes directly below it."""
    masked_at: Keys
    """The keys of the innermost `optax.masked` around the node, or of the state's root."""

    def array(self, field: str) -> jax.Array:
        """A field that is one array."""
        return unboxed(self.fields[field])

    def is_one(self, *kinds: Kind) -> bool:
        """Whether it is a NamedTuple of one of these kinds.

        The fields decide it for a dictionary, which a checkpoint has made of one, and for a class
        of another library. Classes of optax mean different things by the same fields.
        """
        if self.kind.__module__.startswith(("optax.", "optax_largebatch.")):
            return issubclass(self.kind, kinds)
        return any(set(self.fields) == set(getattr(kind, "_fields", ())) for kind in kinds)


def nodes_of(
    state: Any,
    keys: Keys = (),
    masked_at: Keys = (),
) -> Iterator[StateNode]:
    """All nodes of a state, the outer ones first.

    Args:
        state: the state, or an object that holds one, such as an `nnx.Optimizer`.
        keys: the keys on the way to it.
        masked_at: those of the innermost `optax.masked` around it.
    """
    below = children(state)
    if not below:
        return
    if list(below) == list(optax.MaskedState._fields):
        masked_at = keys
    yield StateNode(keys, type(state), below, masked_at)
    for key, child in below.items():
        yield from nodes_of(child, (*keys, key), masked_at)


def nodes_of_kinds(state: Any, *kinds: Kind) -> list[StateNode]:
    """The nodes of a state that are of the given kinds, each with the `kind` that it is of."""
    return [
        node._replace(kind=kind) for node in nodes_of(state) for kind in kinds if node.is_one(kind)
    ]


def seen_by(node: StateNode, state: Any, params: Any) -> list[int]:
    """The numbers of the parameters that have moments behind the same mask as a node."""
    leaves = jax.tree.leaves(params)
    pairs = zip(keyed_arrays(state), owners(state, params), strict=True)
    return sorted(
        {
            owner
            for (keys, array), owner in pairs
            if owner is not None
            and keys[: len(node.masked_at)] == node.masked_at
            and array.shape == leaves[owner].shape
        }
    )


def owners(state: Any, params: Any) -> list[int | None]:
    """The parameter to which each array of a state belongs.

    The array need not have the parameter's shape: some states keep a number or a row for it.

    Args:
        state: the state of any optimizer, or a tree of its structure. A state restored from a
            checkpoint may have dictionaries and lists in the place of tuples.
        params: the parameters.

    Returns:
        The number of the parameter among `jax.tree.leaves(params)`, in the order of
        `jax.tree.leaves(state)`; None for counters and the like, and for arrays that belong to
        single axes of a parameter.
    """
    numbers = numbers_of(params)

    def within(places: list[Keys]) -> list[int | None]:
        """The owners of the arrays in a node, by the keys from there."""
        if all(keys in numbers for keys in places):
            return [numbers[keys] for keys in places]
        of_axes = all(keys and keys[-1].isdigit() and keys[:-1] in numbers for keys in places)
        if of_axes or not all(places):
            return [None] * len(places)
        of_all: list[int | None] = []
        for _, alike in itertools.groupby(places, key=lambda keys: keys[0]):
            of_all += within([keys[1:] for keys in alike])
        return of_all

    return within([keys for keys, _ in keyed_arrays(state)])


def numbers_of(params: Any) -> dict[Keys, int]:
    """The number of each parameter among `jax.tree.leaves(params)`, by its keys."""
    numbers = {keys: number for number, (keys, _) in enumerate(keyed_arrays(params))}
    if isinstance(params, optax.LookaheadParams):  # its optimizer knows only the fast parameters
        numbers |= {keys[1:]: number for keys, number in numbers.items() if keys[0] == "fast"}
    return numbers


class OfParameter(NamedTuple):
    """The entries of a vector of blocks that belong to one parameter."""

    node: StateNode
    number: int
    """The number of the parameter among `jax.tree.leaves(params)`."""
    name: str
    """The name of the parameter, after the name of its node if there are several nodes."""
    entries: slice
    shape: Shape
    """The lengths of the parameter's stacked axes, and the number of the parts of an axis."""


def by_parameter(
    nodes: Sequence[StateNode],
    field: str,
    state: Any,
    params: Any,
    stacked: Stacked = NOT_STACKED,
    *,
    others: int = 0,
    known: Mapping[Keys, Mapping[int, Shape]] | None = None,
) -> list[OfParameter]:
    """The parameters to which the entries of vectors with a number for each block belong.

    Args:
        nodes: those of the state that have the vector.
        field: the vector.
        state: the state.
        params: the parameters.
        stacked: the stacks among them, for nodes that no optimizer has said anything about.
        others: entries at the end that belong to no block.
        known: the shapes of the blocks of the parameters of each node, by the numbers of these and
            by the node's keys, as far as an optimizer says so.

    Returns:
        The entries of each parameter, node by node.

    Raises:
        ValueError: the state does not belong to these parameters, or is that of many models.
    """
    names = leaf_names(params)
    of_all: Mapping[int, Shape] = dict(enumerate(stacked.lengths(params)))
    shapes = []
    for node in nodes:
        size = check_one_model(field, node.array(field), ndim=1).size - others
        lengths = (known or {}).get(node.keys, of_all)
        blocks = sum(map(math.prod, lengths.values()))
        if lengths is of_all and size != blocks:
            lengths = {number: of_all[number] for number in seen_by(node, state, params)}
        shapes.append(lengths)
        if sum(map(math.prod, lengths.values())) != size:
            raise ValueError(
                f"the state holds the {field.replace('_', ' ')} of {size} blocks, and params have "
                f"{blocks}. Pass the optimizer's parameters, and its `stacked` where asked for."
            )
    results = []
    for node, of_part in zip(nodes, shapes, strict=True):
        start = 0
        for number, shape in of_part.items():
            seen_in = [x.keys for x, seen in zip(nodes, shapes, strict=True) if number in seen]
            prefix = labels(seen_in)[seen_in.index(node.keys)]
            name = f"{prefix}/{names[number]}" if prefix else names[number]
            end = start + math.prod(shape)
            results.append(OfParameter(node, number, name, slice(start, end), shape))
            start = end
    return results


def labels(places: Sequence[Keys]) -> list[str]:
    """Names for several places in a state: the keys in which they differ; "" for a single place.

    Wrappers around all places, and keys below the last difference, do not change the names.
    """
    names = []
    for keys in places:
        differing = []
        for depth, key in enumerate(keys):
            alike = [other for other in places if other[:depth] == keys[:depth]]
            if len({other[depth : depth + 1] for other in alike}) > 1:
                differing.append(key)
        names.append("/".join(differing))
    return names


def check_one_model(name: str, array: jax.Array, ndim: int) -> jax.Array:
    """An array of a state, after checking that the state is that of a single model.

    Raises:
        ValueError: it has a first axis for models of `jax.vmap` or copies of `jax.pmap`.
    """
    if np.ndim(array) != ndim:
        raise ValueError(
            f"the state's {name} has the shape {np.shape(array)}, with an axis for the copies of "
            "jax.pmap or the models of jax.vmap. Pass one of them, as in "
            "jax.tree.map(lambda x: x[0], (state, params))."
        )
    return array


def keyed_arrays(tree: Any) -> list[tuple[Keys, Any]]:
    """The arrays of a tree with their keys, in the order of `jax.tree.leaves`.

    Boxes of Flax around an array have no key of their own.
    """
    return [
        (tuple(map(_key, path)), array)
        for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_boxed)
        for array in jax.tree.leaves(node)  # none behind a placeholder in the box
    ]


def children(node: Any) -> dict[str, Any]:
    """The nodes directly below a node of a tree, by their keys; none below an array."""
    if _is_boxed(node):
        return {}
    return {_key(path[-1]): child for path, child in inside(node) if path}


def unboxed(node: Any) -> Any:
    """The array in a box of Flax; anything else as it is."""
    return jax.tree.leaves(node)[0] if _is_boxed(node) else node


def _is_boxed(node: Any) -> bool:
    """Whether a node is a box of Flax around an array, also as read back from a checkpoint."""
    if isinstance(node, Mapping):
        return list(node) == ["value"] and jax.tree_util.all_leaves(node.values())
    return is_box(node) and wraps_one_array(node)


def _key(key: Any) -> str:
    return jax.tree_util.keystr((key,), simple=True)
