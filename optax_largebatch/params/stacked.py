"""Stacked layers: which axes of a parameter run over layers, so that each slice is a block."""

import dataclasses
import math
from typing import Any, Literal

import jax
import numpy as np

from optax_largebatch.norms import lengths_along, other_axes
from optax_largebatch.params import paths
from optax_largebatch.params.fused import stacks_in
from optax_largebatch.params.leaves import Leaves
from optax_largebatch.params.patterns import Entries, IsEntry, are_patterns, entries_of
from optax_largebatch.params.rules import matching
from optax_largebatch.params.segments import BlockAxes, axes_by_text
from optax_largebatch.params.shapes import Axes, Shape

StackedAxes = int | Axes | None
"""One stacked axis, several of them, or None."""


def _is_axes(node: Any) -> bool:
    axes = node if type(node) is tuple else (node,)
    return node is None or all(type(x) is int or isinstance(x, np.integer) for x in axes)


def _is_axes_or_text(node: Any) -> bool:
    return isinstance(node, str) or _is_axes(node)


@dataclasses.dataclass(frozen=True)
class Stacked:
    """The result of `stacked_layers`: pass it as the argument `stacked`.

    It is data, as a `Rule` is: it can be pickled, compared and hashed.
    """

    description: str = dataclasses.field(compare=False)
    entries: Entries
    """The stacked axes of the parameters, or their texts, by the patterns of those."""
    if_forgotten: Literal["nothing", "warning", "error"] = "nothing"
    """What happens at `init` if stacks seem to be forgotten."""
    texts: Entries | None = dataclasses.field(default=None, compare=False)
    """What has the texts that cut axes into blocks, if there are any."""

    def axes(self, params: Any) -> list[Axes]:
        """The stacked axes of each leaf, counted from 0, in the order of `jax.tree.leaves`."""
        leaves = jax.tree.leaves(params)
        if self.entries.says_nothing:
            return [()] * len(leaves)
        named = zip(paths.leaf_names(params), leaves, self.entries.of(params), strict=True)
        return [_stack(*each, self.entries.is_entry) for each in named]

    def blocks(self, params: Any) -> Any:
        """The parameters, each with the shape of one block, for masks to look at.

        A stack of biases has two axes, but rules and mask functions see each as a bias.
        """
        leaves, structure = jax.tree.flatten(params)
        axes = self.axes(params)
        if not any(axes):
            return params
        return structure.unflatten(map(_block, leaves, axes))

    def over_blocks(self, leaves: Leaves) -> list[BlockAxes]:
        """The axes of each leaf that run over its blocks, and the segments of one that is cut."""
        stacks = self.axes(leaves.tree)
        if self.texts is None:
            return list(map(BlockAxes, stacks))
        argument = self.texts.argument
        texts = self.texts.texts(leaves.tree)
        return [
            BlockAxes(stack) if text is None else axes_by_text(argument, text, stack, leaves, index)
            for index, (stack, text) in enumerate(zip(stacks, texts, strict=True))
        ]

    def blocks_of(self, params: Any) -> list[BlockAxes]:
        """The axes of `over_blocks`, of parameters or of their shapes."""
        leaves, structure = jax.tree.flatten(params)
        return self.over_blocks(Leaves(params, structure, leaves))

    def lengths(self, params: Any) -> list[Shape]:
        """The lengths of the axes of each leaf that run over blocks."""
        shapes = map(np.shape, jax.tree.leaves(params))
        return list(map(BlockAxes.lengths, self.blocks_of(params), shapes))

    def sizes(self, params: Any) -> list[int]:
        """The number of blocks in each leaf."""
        return list(map(math.prod, self.lengths(params)))

    @property
    def unchecked(self) -> "Stacked":
        """The same stacks, where another transform looks for those that are forgotten."""
        return dataclasses.replace(self, if_forgotten="nothing")

    def __repr__(self) -> str:
        return self.description


Stacks = Stacked | dict[str, StackedAxes | str] | None
"""What `stacked` may be: the result of `stacked_layers`, its patterns alone, or None."""

_NAME = "stacked_layers"

NOT_STACKED = Stacked("stacked_layers({})", Entries(_NAME, _is_axes_or_text))
"""Every leaf is one block."""


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
    if are_patterns(where, _is_axes_or_text):
        return _by_patterns(where)
    if paths.is_function(where):
        return Stacked(f"stacked_layers({where!r})", entries_of(_NAME, where, _is_axes))
    for path, axes in jax.tree_util.tree_leaves_with_path(where, is_leaf=_is_axes):
        if not _is_axes(axes):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise _no_axes(f"{name!r} " if path else "", axes)
    return Stacked("stacked_layers(a tree of axes)", entries_of(_NAME, where, _is_axes))


def check_stacked(
    stacked: Any,
    if_forgotten: Literal["warning", "error"] = "warning",
    segments: bool = True,
) -> Stacked:
    """The argument `stacked`, checked; with None, no parameter is a stack.

    Args:
        stacked: the argument.
        if_forgotten: what happens with None at `init`, if some parameters look like stacks.
        segments: whether a text may cut an axis.
    """
    if stacked is None:
        return dataclasses.replace(NOT_STACKED, description="None", if_forgotten=if_forgotten)
    if are_patterns(stacked, _is_axes_or_text):
        stacked = _by_patterns(stacked)
    if not isinstance(stacked, Stacked):
        raise TypeError(
            "stacked must be None, patterns with their stacked axes, as in {'layers/': 0}, or what "
            f"stacked_layers(...) returns; got {stacked!r} of type {type(stacked).__name__}."
        )
    if stacked.texts and not segments:
        raise ValueError(
            f"stacked must be axes without a text here, got {stacked}: only norms and trust "
            "ratios know parts of an axis. Give Muon the text by matrix_axes=."
        )
    return stacked


def have_several_elements(leaves: Leaves, stacked: Stacked) -> list[bool]:
    """Whether the blocks of each leaf have several elements; the size of one means nothing."""
    axes = stacked.axes(leaves.tree)
    pairs = zip(map(_block, leaves.arrays, axes), axes, strict=True)
    # What is here is enough for most leaves. How the others are split may not be known.
    return [
        block.size > 1 or leaves.elements_of_block(index, stack) > 1
        for index, (block, stack) in enumerate(pairs)
    ]


def _by_patterns(where: dict[str, StackedAxes | str]) -> Stacked:
    """The stacks by patterns; those with a text come last."""
    order = sorted(where, key=lambda pattern: (isinstance(where[pattern], str), pattern))
    said = []
    for pattern in order:
        matching(pattern)  # its errors
        entry = where[pattern]
        said.append((pattern, entry if isinstance(entry, str) else _as_tuple(entry)))
    entries = Entries(_NAME, _is_axes_or_text, tuple(said))
    has_texts = any(isinstance(entry, str) for entry in where.values())
    texts = entries if has_texts else None
    return Stacked(repr(where), entries, "warning" if where else "nothing", texts)


def _no_axes(of: str, node: Any) -> TypeError:
    return TypeError(
        f"{_NAME}: {of}must have an integer, a tuple of integers or None for its stacked axes, "
        f"got {node!r} of type {type(node).__name__}."
    )


def _as_tuple(axes: StackedAxes) -> Axes:
    if axes is None:
        return ()
    return tuple(map(int, axes if isinstance(axes, tuple) else (axes,)))


def _stack(
    name: str,
    leaf: Any,
    entries: list[Any],
    is_entry: IsEntry,
) -> Axes:
    """The stacked axes of a leaf in order, counted from 0."""
    axes: Axes = ()
    for entry in entries:
        if not is_entry(entry):
            raise _no_axes(f"the parameter {name!r} ", entry)
        if isinstance(entry, str):
            axes += tuple(axis for axis in stacks_in(entry) if axis not in axes)
        else:
            axes += _as_tuple(entry)
    if not axes or not hasattr(leaf, "ndim"):  # optax initialises with placeholders, too
        return ()
    for axis in axes:
        if not -leaf.ndim <= axis < leaf.ndim:
            raise ValueError(
                f"{_NAME}: the parameter {name!r} of shape {leaf.shape} has no axis {axis}. "
                "Correct the axis, or narrow the pattern to the parameters that are stacked."
            )
    counted = sorted([axis % leaf.ndim for axis in axes])
    if len(set(counted)) < len(counted):
        raise ValueError(
            f"{_NAME}: the parameter {name!r} is given the axes {axes}, one of them twice. Each "
            "pattern that matches a parameter adds its axes: write each axis in one pattern."
        )
    return tuple(counted)


def _block(leaf: Any, axes: Axes) -> Any:
    if not axes:
        return leaf
    shape = lengths_along(leaf.shape, other_axes(leaf.ndim, axes))
    return jax.ShapeDtypeStruct(shape, leaf.dtype)
