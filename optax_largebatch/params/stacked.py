"""Stacked layers: which axes of a parameter run over layers, so that each slice is a block."""

from collections.abc import Callable
import dataclasses
import itertools
import math
from typing import Any, Literal, NamedTuple
import warnings

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from optax_largebatch import norms
from optax_largebatch.params import paths
from optax_largebatch.params.fused import read_fused, stacks_in
from optax_largebatch.params.leaves import Layout, Leaves
from optax_largebatch.params.likely_stacks import LikelyStack, declaration, likely_stacks
from optax_largebatch.params.rules import Rule, matching

Axes = int | tuple[int, ...] | None
"""One stacked axis, several of them, or None."""


class Parts(NamedTuple):
    """The parts that an axis of a parameter is cut into, each of which is a block."""

    axis: int
    """The axis."""
    axes: tuple[int, ...]
    """This axis and those of the stack, which run over blocks."""
    numbers: tuple[int, ...]
    """For each index along it the number of its part."""
    layout: Layout
    """How the parameter is split between devices."""

    @property
    def number(self) -> int:
        """How many parts there are."""
        return max(self.numbers) + 1

    @property
    def lengths(self) -> np.ndarray:
        """How many indices each part has."""
        return np.bincount(self.numbers)

    def along_axis(self, numbers: Any) -> Any:
        """A vector of numbers of the parts, in an array that broadcasts."""
        ndim = len(self.layout.shape)
        return numbers.reshape([self.number if axis == self.axis else 1 for axis in range(ndim)])

    def sums_of_each(self, sums: jax.Array) -> jax.Array:
        """Sums for each index along the axis, of this device, added up for each part.

        The sum over devices has those of the whole parameter.
        """
        here = norms.local_shard(jnp.array(self.numbers), 0, self.layout.mesh_axes[self.axis])
        first = jnp.moveaxis(norms.with_spec(sums, PartitionSpec()), self.axis, 0)
        of_parts = jax.ops.segment_sum(first, here, self.number)
        stack = (axis for axis in self.axes if axis != self.axis)
        return self.layout.placed(jnp.moveaxis(of_parts, 0, self.axis), stack)

    def answer(self, asked: Any, total: jax.Array) -> jax.Array:
        """The answer to a `Statistic` of blocks, from the sum for each.

        It has an entry for each index along the axis, the same for all of a part.
        """
        if asked.kept is not None:
            return total
        if asked.kind in ("mean", "rms"):
            total /= self.along_axis(self.lengths).astype(total.dtype)
            total /= math.prod(n for k, n in enumerate(self.layout.shape) if k not in self.axes)
        total = self.of_device(total)
        return norms.from_sum_of_squares(total) if asked.is_root else total

    def of_device(self, numbers: jax.Array) -> jax.Array:
        """Numbers of the parts, for each index along the axis that this device has."""
        return self.layout.local_shard(self.spread(numbers))

    def spread(self, numbers: jax.Array) -> jax.Array:
        """Numbers of the parts, given to each index along the axis."""
        return jnp.take(numbers, np.array(self.numbers), self.axis)

    def first(self, numbers: jax.Array) -> jax.Array:
        """The reverse of `spread`."""
        return jnp.take(numbers, np.unique(self.numbers, return_index=True)[1], self.axis)


@dataclasses.dataclass(frozen=True)
class Stacked:
    """The result of `stacked_layers`: pass it as the argument `stacked`.

    It is data, as a `Rule` is: it can be pickled, compared and hashed.
    """

    description: str = dataclasses.field(compare=False)
    resolve: Callable[[Any], list[Axes]]
    if_forgotten: Literal["nothing", "warning", "error"] = "nothing"
    """What happens at `init` if stacks seem to be forgotten."""
    texts: Callable[[Any], list[str | None]] | None = dataclasses.field(default=None, compare=False)
    """The texts that name or cut the axes of some parameters, if there are any."""
    texts_in: str = dataclasses.field(default="stacked_layers", compare=False)
    """The argument that has the texts, for messages."""

    def axes(self, params: Any) -> list[tuple[int, ...]]:
        """The stacked axes of each leaf, counted from 0, in the order of `jax.tree.leaves`."""
        leaves = jax.tree.leaves(params)
        if not leaves:  # of a placeholder, too, which a function of the parameters does not know
            return []
        checked = []
        for index, (leaf, axes) in enumerate(zip(leaves, self.resolve(params), strict=True)):
            try:
                is_none = axes is None or (type(axes) is tuple and not axes)
                checked.append(() if is_none else _checked_axes(leaf, axes))
            except (TypeError, ValueError) as error:
                name = paths.leaf_names(params)[index]
                raise type(error)(f"stacked_layers: the parameter {name!r} {error}") from None
        return checked

    def blocks(self, params: Any) -> Any:
        """The parameters, each with the shape of one block, for masks to look at.

        A stack of biases has two axes, but rules and mask functions see each as a bias.
        """
        leaves, structure = jax.tree.flatten(params)
        axes = self.axes(params)
        if not any(axes):
            return params
        return structure.unflatten(map(_block, leaves, axes))

    def over_blocks(self, leaves: Leaves) -> list[tuple[tuple[int, ...], Parts | None]]:
        """The axes of each leaf that run over its blocks, and the parts if one of them is cut."""
        axes = self.axes(leaves.tree)
        if self.texts is None:
            return [(one, None) for one in axes]
        known = enumerate(zip(axes, self.texts(leaves.tree), strict=True))
        return [
            (one, None) if text is None else _cut(self.texts_in, leaves, k, one, text)
            for k, (one, text) in known
        ]

    def lengths(self, params: Any) -> list[tuple[int, ...]]:
        """The shape of an array with a number for each block of a leaf, for each leaf."""
        leaves, structure = jax.tree.flatten(params)
        known = zip(leaves, self.over_blocks(Leaves(params, structure, leaves)), strict=True)
        return [
            tuple(cut.number if cut and k == cut.axis else leaf.shape[k] for k in axes)
            for leaf, (axes, cut) in known
        ]

    def sizes(self, params: Any) -> list[int]:
        """The number of blocks in each leaf."""
        return [math.prod(shape) for shape in self.lengths(params)]

    @property
    def unchecked(self) -> "Stacked":
        """The same stacks, where another transform looks for those that are forgotten."""
        return dataclasses.replace(self, if_forgotten="nothing")

    def forgotten(self, params: Any) -> list[LikelyStack]:
        """The parameters that look like stacks, where nobody has said whether they are."""
        if self.if_forgotten == "nothing":
            return []
        said = getattr(self.resolve, "not_stacked", lambda params: set())(params)
        # At the root, a network of few parameters has lengths that are equal by chance.
        return [
            one
            for one in likely_stacks(params, self.axes(params))
            if one.number not in said
            and (not one.beside or one.name.split("/")[0] == one.beside.split("/")[0])
        ]

    def check_none_forgotten(self, params: Any) -> None:
        """Warns, or raises, if some parameters look like stacks, and nobody has said whether."""
        stacks = self.forgotten(params)
        if not stacks:
            return
        first = stacks[0]
        message = (
            f"{len({one.number for one in stacks})} of {len(paths.leaf_names(params))} parameters "
            "look like stacks of "
            f"layers, such as {first.name!r} of shape {first.shape}, and stacked={self} does not "
            "declare them. Each would count as one layer, or as no matrix, and a stack of biases "
            f"as a matrix. Declare them: stacked={declaration(one.entry for one in stacks)}. If "
            f"one is no stack, say so by None in place of the axis: {{{first.pattern!r}: None}}."
        )
        if self.if_forgotten == "error":
            raise ValueError(message)
        warnings.warn(message, stacklevel=2)

    def check_not_flat(self, params: Any) -> None:
        """Warns if a whole network seems to lie in one vector."""
        if self.if_forgotten == "nothing" or not jax.tree_util.all_leaves([params]):
            return
        size = math.prod(shape) if len(shape := np.shape(params)) == 1 else 0
        if size > LARGEST_TOY:
            warnings.warn(
                f"the parameters are one vector of {size} numbers, as after optax.flatten or "
                "ravel_pytree, so all layers have one norm. Pass the tree of the network. If the "
                "vector is one layer, say so: stacked={}.",
                stacklevel=3,
            )

    def __repr__(self) -> str:
        return self.description


LARGEST_TOY = 64
"""So many numbers in one vector, and no more, are no network."""

Stacks = Stacked | dict[str, Axes | str] | None
"""What `stacked` may be: the result of `stacked_layers`, its patterns alone, or None."""


@dataclasses.dataclass(frozen=True)
class _ByPatterns:
    """Each pattern adds its axes to those of the parameters that it matches."""

    rules: tuple[tuple[Rule, tuple[int, ...], str | None], ...]
    """Each with its axes and its text, those with a text last."""

    def __call__(self, params: Any) -> list[Axes]:
        if not self.rules:
            return [None] * len(jax.tree.leaves(params))
        return [axes for axes, _ in self._found(params)]

    def texts(self, params: Any) -> list[str | None]:
        """The text of each leaf that has one."""
        return [text for _, text in self._found(params)]

    def _found(self, params: Any) -> list[tuple[tuple[int, ...], str | None]]:
        named = paths.named_leaves(params)
        found: list[tuple[tuple[int, ...], str | None]] = [((), None)] * len(named)
        for rule, axes, text in self.rules:
            try:
                chosen = rule.select(named)
            except ValueError as error:
                raise ValueError(f"stacked_layers: {error}") from None
            for k in itertools.compress(range(len(named)), chosen):
                old, before = found[k]
                new = tuple(axis for axis in axes if text is None or axis not in old)
                found[k] = old + new, before if text is None else text
        return list(itertools.compress(found, [not paths.is_hidden(leaf) for _, leaf in named]))

    def not_stacked(self, params: Any) -> set[int]:
        """The numbers of the leaves that a pattern says are no stacks."""
        said = [rule for rule, axes, _ in self.rules if not axes]
        chosen = [jax.tree.leaves(rule.mask(params)) for rule in said]
        return {number for flags in chosen for number, flag in enumerate(flags) if flag}


@dataclasses.dataclass(frozen=True)
class _ByTree:
    """A tree of axes like the parameters, or a prefix of it, in two parts that have a hash."""

    axes: tuple[Axes, ...]
    structure: Any

    def __call__(self, params: Any) -> list[Axes]:
        return _like(self.structure.unflatten(self.axes), params)


@dataclasses.dataclass(frozen=True)
class _ByFunction:
    """A function of the parameters that returns such a tree."""

    function: Callable[[Any], Any]

    def __call__(self, params: Any) -> list[Axes]:
        return _like(self.function(params), params)


NOT_STACKED = Stacked("stacked_layers({})", _ByPatterns(()))
"""Every leaf is one block."""

NOT_SAID = Stacked("None", _ByPatterns(()), if_forgotten="warning")
"""The same, where nobody has said so."""


def stacked_layers(where: Any) -> Stacked:
    r"""Says which parameters stack layers, so that each slice has its own norm and trust ratio.

    `flax.linen.scan`, `nnx.vmap`, `equinox.filter_vmap` and mixtures of experts keep the
    parameters of many layers in one array. A norm over that array mixes the layers: its trust ratio
    moves a layer with small weights much too far, and a layer with large weights not at all. If
    it knows the stacked axes, an optimizer takes the step that it would take with separate layers.

    Args:
        where: one of

            - patterns, `{"layers/": 0}`: the parameters whose name matches (as in `matching`) have
              this stacked axis, or several, as in `{"experts/": (0, 1)}`. A name that matches
              several patterns has the axes of all. None says that a parameter is no stack, though
              it may look like one; `{}` says so of all. A text cuts an axis, so that each part has
              its own norm: `{"qkv/kernel": "rows columns=2048+512+512"}` for queries, keys and
              values, or `"rows (16 columns)"` for heads, with a name for each stacked axis;
            - a tree of axes like the parameters (or a prefix of it), None where there are none;
            - a function of the parameters that returns such a tree.

    Returns:
        The argument `stacked` of an optimizer or a transformation. Patterns alone may be passed
        there as they are: `stacked={"layers/": 0}`.

    An optimizer without `stacked`, or whose patterns leave out what looks like a stack, warns at
    `init`; `muonh` raises, if it has none.

    Raises:
        TypeError: `where` is none of these, or an axis is no integer.
        ValueError: a pattern is no regular expression; and, when it meets the parameters, a
            pattern matches none, an axis is named twice or does not exist, or the trees differ.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import scale_by_trust_ratio, stacked_layers
        >>> params = {"layers": {"kernel": jnp.array([[3.0, 4.0], [0.3, 0.4]])}}
        >>> transform = scale_by_trust_ratio(stacked=stacked_layers({"layers/": 0}))
        >>> updates = {"layers": {"kernel": jnp.array([[0.0, 1.0], [0.0, 1.0]])}}
        >>> updates, state = transform.update(updates, transform.init(params), params)
        >>> print(state.trust_ratios)
        [5.  0.5]
    """
    if _is_patterns(where):
        order = sorted(where, key=lambda pattern: (isinstance(where[pattern], str), pattern))
        rules = ((matching(pattern), *_axes_and_text(where[pattern])) for pattern in order)
        by_patterns = _ByPatterns(tuple(rules))
        texts = by_patterns.texts if any(isinstance(x, str) for x in where.values()) else None
        return Stacked(repr(where), by_patterns, "warning" if where else "nothing", texts)
    if paths.is_function(where):
        return Stacked(f"stacked_layers({where!r})", _ByFunction(where))
    for path, axes in jax.tree_util.tree_leaves_with_path(where, is_leaf=_is_axes):
        if not _is_axes(axes):
            at = f" {paths.path_name(where, path)!r}" if path else ""
            raise TypeError(f"stacked_layers:{at} {_no_axes(axes)}")
    axes, structure = jax.tree.flatten(where, is_leaf=_is_axes)
    return Stacked("stacked_layers(a tree of axes)", _ByTree(tuple(axes), structure))


def check_stacked(
    stacked: Any, if_forgotten: Literal["warning", "error"] = "warning", parts: bool = True
) -> Stacked:
    """The argument `stacked`, checked; with None, no parameter is a stack.

    Args:
        stacked: the argument.
        if_forgotten: what happens with None at `init`, if some parameters look like stacks.
        parts: whether a text may cut an axis.
    """
    if stacked is None:
        return dataclasses.replace(NOT_SAID, if_forgotten=if_forgotten)
    stacked = stacked_layers(stacked) if _is_patterns(stacked) else stacked
    if isinstance(stacked, Stacked):
        if stacked.texts and not parts:
            raise ValueError(
                f"stacked must be axes without a text here, got {stacked}: only norms and trust "
                "ratios know parts of an axis. Give Muon the text by matrix_axes=."
            )
        return stacked
    raise TypeError(
        "stacked must be None, patterns with their stacked axes, as in {'layers/': 0}, or what "
        f"stacked_layers(...) returns; got {stacked!r} of type {type(stacked).__name__}."
    )


def _like(tree: Any, params: Any) -> list[Axes]:
    return paths.broadcast_prefix("stacked_layers: the axes", tree, params, _is_axes)


def _is_patterns(where: Any) -> bool:
    return (
        isinstance(where, dict)
        and all(isinstance(key, str) for key in where)
        and all(isinstance(axes, str) or _is_axes(axes) for axes in where.values())
    )


def _is_axes(node: Any) -> bool:
    axes = node if type(node) is tuple else (node,)
    return node is None or all(type(one) is int or isinstance(one, np.integer) for one in axes)


def _no_axes(node: Any) -> str:
    return (
        "must have an integer, a tuple of integers or None for its stacked axes, got "
        f"{node!r} of type {type(node).__name__}."
    )


def _axes_and_text(entry: Axes | str) -> tuple[tuple[int, ...], str | None]:
    return (stacks_in(entry), entry) if isinstance(entry, str) else (_as_tuple(entry), None)


def check_text_of_stack(argument: str, name: str, text: str, stack: tuple[int, ...]) -> None:
    """Checks that no stacked axis is one of rows or columns in a text."""
    if wrong := {*stack} - {*stacks_in(text)}:
        raise ValueError(
            f"{argument}: {text!r} has rows or columns along axis {min(wrong)} of {name!r}, which "
            "stacks layers by stacked=. Give that axis another name in the text, such as layers."
        )


def _cut(
    argument: str, leaves: Leaves, index: int, stack: tuple[int, ...], text: str
) -> tuple[tuple[int, ...], Parts | None]:
    """The axes over the blocks of a leaf by its text, and the parts if that cuts an axis."""
    name = leaves.names[index]
    check_text_of_stack(argument, name, text, stack)
    stack = stacks_in(text)
    layout = leaves.layout(index, "a norm of each part of an axis needs all of the axis")
    *sides, fused = read_fused(argument, name, layout.shape, text)
    if fused is None or not fused.cut_sides:
        return stack, None
    side, *others = fused.cut_sides
    table = fused.numbered(side).reshape([layout.shape[axis] for axis in sides[side]])
    cut = [k for k in range(table.ndim) if np.ptp(table, k).any()]
    if others or len(cut) > 1:
        raise ValueError(
            f"{argument}: {text!r} must cut one axis of {name!r}, and cuts two: a norm is of a "
            "part of one axis. Name the other one without cutting it, or keep the matrices in "
            "several parameters."
        )
    (k,) = cut
    along, axis = np.moveaxis(table, k, 0).reshape(table.shape[k], -1)[:, 0], sides[side][k]
    axes = tuple(sorted({*stack, axis}))
    return axes, Parts(axis, axes, tuple(along.tolist()), layout)


def _as_tuple(axes: Axes) -> tuple[int, ...]:
    return () if axes is None else tuple(map(int, axes if isinstance(axes, tuple) else (axes,)))


def _checked_axes(leaf: Any, axes: Axes) -> tuple[int, ...]:
    """The axes of a leaf in order, counted from 0."""
    if not _is_axes(axes):
        raise TypeError(_no_axes(axes))
    stacked = _as_tuple(axes)
    if not stacked or not hasattr(leaf, "ndim"):  # optax initialises with placeholders, too
        return ()
    for axis in stacked:
        if not -leaf.ndim <= axis < leaf.ndim:
            raise ValueError(
                f"of shape {leaf.shape} has no axis {axis}. Correct the axis, or narrow the "
                "pattern to the parameters that are stacked."
            )
    counted = sorted([axis % leaf.ndim for axis in stacked])
    if len(set(counted)) < len(counted):
        raise ValueError(
            f"is given the axes {stacked}, one of them twice. Each pattern that matches a "
            "parameter adds its axes: write each axis in one pattern."
        )
    return tuple(counted)


def _block(leaf: Any, axes: tuple[int, ...]) -> Any:
    shape = [size for axis, size in enumerate(np.shape(leaf)) if axis not in axes]
    return jax.ShapeDtypeStruct(shape, leaf.dtype) if axes else leaf


def whole_shape(
    leaves: Leaves, index: int, axes: tuple[int, ...], cut: Parts | None
) -> tuple[int, ...]:
    """The shape of an array with a number for each block of a leaf, on all devices together."""
    whole = leaves.layout(index, "blocks have numbers").shape if axes else ()
    return tuple(
        cut.number if cut and axis == cut.axis else size
        for axis, size in enumerate(norms.shape_of_blocks(whole, axes))
    )


def blocks_of_leaf(
    numbers: jax.Array, index: int, axes: tuple[int, ...], leaves: Leaves, cut: Parts | None = None
) -> jax.Array:
    """A vector with one entry for each block of a leaf, the same on all devices."""
    if not axes:
        return jax.lax.reshape(numbers, (1,))
    shape = enumerate(leaves.arrays[index].shape)
    vector = jnp.broadcast_to(numbers, [size if axis in axes else 1 for axis, size in shape])
    for axis in axes:
        vector = norms.gathered(vector, axis, leaves.axes_along(index, axis))
    return jnp.ravel(cut.first(vector) if cut else vector)


def have_several_elements(leaves: Leaves, stacked: Stacked) -> list[bool]:
    """Whether the blocks of each leaf have several elements; the size of one means nothing."""
    axes = stacked.axes(leaves.tree)
    return [not leaves.one_element(index, stack) for index, stack in enumerate(axes)]
