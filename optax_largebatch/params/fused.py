"""Matrices that are fused in one parameter, as queries, keys and values are, or heads."""

from collections.abc import Callable, Sequence
import difflib
import itertools
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_largebatch.params.shapes import Axes, Shape

_ITEM = re.compile(r"\([^()]*\)|[^\s()]+")
_WORD = re.compile(r"[1-9]\d*|[A-Za-z_]\w*|(rows|columns)=[1-9]\d*(\+[1-9]\d*)*")
_MEANT = {
    "rows": "rows", "inputs": "rows",
    "columns": "columns", "outputs": "columns", "cols": "columns", "col": "columns",
}  # fmt: skip
"""What a word that is nearly one of these is likely to mean."""
_NEARLY = 0.75
"""How alike two words are, as difflib counts, if one may be the other with a typing error."""


class Fused(NamedTuple):
    """How a matrix is fused of others."""

    words: tuple[Shape, ...]
    """The lengths of the words that each of its axes is cut into: first its rows, then columns."""
    row_axes: int
    """How many of its axes are rows."""
    rows: Axes
    """Which of all words are rows of a matrix inside; those that are neither rows nor columns
    count matrices."""
    columns: Axes
    """Which of them are columns."""
    segments: Shape
    """The lengths of the segments of one word, each of which has its matrices."""
    segmented: int
    """This word."""

    @property
    def lengths(self) -> Shape:
        """The lengths of all words."""
        return tuple(itertools.chain(*self.words))

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The rows and columns of the matrices in each segment."""

        def side(words: Axes, segment: int) -> int:
            lengths = (segment if k == self.segmented else self.lengths[k] for k in words)
            return math.prod(lengths)

        return [(side(self.rows, n), side(self.columns, n)) for n in self.segments]

    @property
    def number(self) -> int:
        """How many matrices each segment has."""
        return math.prod(self._counts.values())

    @property
    def cut_axes(self) -> Axes:
        """The axes that are cut between matrices."""
        return tuple(sorted({self._axes[k] for k in self._ids}))

    @property
    def cut_sides(self) -> tuple[int, ...]:
        """The sides that are cut between matrices: 0 for the rows and 1 for the columns."""
        return tuple(sorted({int(axis >= self.row_axes) for axis in self.cut_axes}))

    @property
    def sides(self) -> tuple[slice, slice]:
        """The axes of its rows, and those of its columns."""
        return slice(0, self.row_axes), slice(self.row_axes, None)

    def ids_along(self, axes: slice) -> np.ndarray:
        """For each index along some axes the number of its matrix, as far as they are cut."""
        matrices = np.zeros(math.prod(itertools.chain(*self.words[axes])), int)
        ids = self._ids
        for k, places in self._places(axes).items():
            if k in ids:
                matrices = matrices * (ids[k].max() + 1) + ids[k][places]
        return matrices

    def spread(self, values: Sequence[float]) -> tuple[int, np.ndarray]:
        """A value for each segment, along the axis that has them: which axis, and a vector."""
        axis = self._axes[self.segmented]
        places = self._places(slice(axis, axis + 1))[self.segmented]
        return axis, np.repeat(values, self.segments)[places]

    @property
    def _axes(self) -> list[int]:
        """The axis of each word."""
        return [axis for axis, lengths in enumerate(self.words) for _ in lengths]

    @property
    def _counts(self) -> dict[int, int]:
        """The lengths of the words that count matrices."""
        sides = (*self.rows, *self.columns)
        return {k: length for k, length in enumerate(self.lengths) if k not in sides}

    @property
    def _ids(self) -> dict[int, np.ndarray]:
        """For each word that counts matrices, the number that each of its indices has."""
        ids = {k: np.arange(n) for k, n in self._counts.items() if n > 1}
        if len(self.segments) > 1:
            ids[self.segmented] = np.repeat(np.arange(len(self.segments)), self.segments)
        return ids

    def _places(self, axes: slice) -> dict[int, np.ndarray]:
        """For each index along some axes its place in each of their words."""
        first = sum(map(len, self.words[: axes.start]))
        lengths = tuple(itertools.chain(*self.words[axes]))
        places = np.unravel_index(np.arange(math.prod(lengths)), lengths)
        return dict(enumerate(places, first))

    def map(
        self, function: Callable[..., jax.Array], matrix: jax.Array, *numbers: Any
    ) -> jax.Array:
        """The fused matrix, with `function` of each matrix inside in the place of that matrix.

        Args:
            function: takes a matrix and `numbers`.
            matrix: the fused matrix, or the transposed one.
            *numbers: of this step.
        """
        shape = tuple(math.prod(itertools.chain(*self.words[axes])) for axes in self.sides)
        is_transposed = matrix.shape != shape
        upright = matrix.T if is_transposed else matrix
        ends = list(itertools.accumulate(self.segments))
        of_each = jax.vmap(lambda inner: function(inner, *numbers))
        mapped = []
        for segment in jnp.split(upright.reshape(self.lengths), ends[:-1], self.segmented):
            matrices = of_each(to_batch(segment, self.rows, self.columns))
            mapped.append(from_batch(matrices, segment.shape, self.rows, self.columns))
        result = jnp.concatenate(mapped, self.segmented).reshape(shape)
        return result.T if is_transposed else result


def to_batch(x: jax.Array, rows: Sequence[int], columns: Sequence[int]) -> jax.Array:
    """The matrices of an array as a batch; its other axes stack them."""
    groups = (stack_of(x.ndim, rows, columns), rows, columns)
    lengths = [math.prod([x.shape[axis] for axis in axes]) for axes in groups]
    return jnp.transpose(x, list(itertools.chain(*groups))).reshape(lengths)


def from_batch(
    matrices: jax.Array, shape: Shape, rows: Sequence[int], columns: Sequence[int]
) -> jax.Array:
    """The array of this shape, the reverse of `to_batch`."""
    order = [*stack_of(len(shape), rows, columns), *rows, *columns]
    turned = matrices.reshape([shape[axis] for axis in order])
    return jnp.transpose(turned, np.argsort(order).tolist())


def stack_of(ndim: int, rows: Sequence[int], columns: Sequence[int]) -> Axes:
    """The axes that are neither rows nor columns."""
    return tuple([axis for axis in range(ndim) if axis not in (*rows, *columns)])


class Sides(NamedTuple):
    """The axes of a parameter that are rows of its matrices, and those that are columns."""

    rows: Axes
    columns: Axes
    fused: Fused | None = None
    """What each matrix is fused of, if it is."""


class Word(NamedTuple):
    """A word of the text, which is an axis, or one of those that an axis is cut into."""

    name: str
    size: int
    """The length that the text says, or 0."""
    inside: Shape = ()
    """The lengths of its segments, if they differ."""


def read_fused(argument: str, name: str, shape: Shape, text: str) -> Sides:
    """The axes of rows and those of columns in a text, and what the matrices are fused of.

    Args:
        argument: what has the text.
        name: of the parameter.
        shape: of the whole parameter.
        text: an item for each axis, as in `"layers rows (3 columns)"`.

    Raises:
        ValueError: the text cannot be read, or does not fit the shape.
    """
    try:
        return _read(text, shape, least_sides=2 if argument == "matrix_axes" else 1)
    except ValueError as error:
        raise ValueError(
            f"{argument}: {text!r} does not fit {name!r} of shape {shape}: it {error}. Narrow the "
            "pattern, or write an item for each axis of the whole array (inside of shard_map, init "
            "sees a shard): rows, columns, or another name for an axis that stacks matrices; "
            "(3 columns) for three matrices side by side; columns=8+2+2 for unequal ones."
        ) from None


def _read(text: str, shape: Shape, least_sides: int) -> Sides:
    items = _ITEM.findall(text)
    if _ITEM.sub("", text).strip():
        raise ValueError("has parentheses that are not in pairs, or one pair inside another")
    if len(items) != len(shape):
        raise ValueError(f"has {len(items)} items for {len(shape)} axes")
    of_axes = [_words(item, length) for item, length in zip(items, shape, strict=True)]

    def axes_with(side: str) -> Axes:
        return tuple(k for k, words in enumerate(of_axes) if side in [x.name for x in words])

    rows, columns = axes_with("rows"), axes_with("columns")
    order = (*rows, *columns)
    if bool(rows) + bool(columns) < least_sides or not {*rows}.isdisjoint(columns):
        raise ValueError("must have an axis with rows, and another one with columns")
    words = [word for axis in order for word in of_axes[axis]]
    unequal = [k for k, word in enumerate(words) if word.inside]
    if len(unequal) > 1:
        raise ValueError("may have one sum of parts")
    if len(words) == len(order) and not unequal:
        return Sides(rows, columns)
    if 0 in shape:
        raise ValueError("cuts an array without elements")
    segmented = unequal[0] if unequal else 0
    fused = Fused(
        words=tuple(tuple(word.size for word in of_axes[axis]) for axis in order),
        row_axes=len(rows),
        rows=tuple(k for k, word in enumerate(words) if word.name == "rows"),
        columns=tuple(k for k, word in enumerate(words) if word.name == "columns"),
        segments=words[segmented].inside or (words[segmented].size,),
        segmented=segmented,
    )
    return Sides(rows, columns, fused)


def stacks_in(text: str) -> Axes:
    """The axes of a text that stack matrices."""
    is_side = re.compile(r"\b(rows|columns)\b").search
    return tuple(axis for axis, item in enumerate(_ITEM.findall(text)) if not is_side(item))


def check_text(argument: str, text: str, name: str, stack: Axes) -> None:
    """Checks that no stacked axis is one of rows or columns in a text."""
    if wrong := {*stack} - {*stacks_in(text)}:
        raise ValueError(
            f"{argument}: {text!r} has rows or columns along axis {min(wrong)} of {name!r}, which "
            "stacks layers by stacked=. Give that axis another name in the text, such as layers."
        )


def _words(item: str, length: int) -> list[Word]:
    """The words that an item cuts an axis of this length into."""
    words: list[Word] = []
    for text in item.strip("()").split():
        if not _WORD.fullmatch(text):
            raise ValueError(f"has {text!r}, which is no number, no name, and no sum of parts")
        name, _, written = text.partition("=")
        _check_name(name)
        segments = tuple(map(int, written.split("+"))) if written else ()
        if len(segments) > 1 and len({*segments}) == 1:  # equal ones, which devices may share
            words.append(Word(str(len(segments)), len(segments)))
            segments = segments[:1]
        size = int(name) if name.isdigit() else sum(segments)
        words.append(Word(name, size, segments if len(segments) > 1 else ()))
    if not words:
        raise ValueError(f"has {item}, in which there is no word")
    rest, remainder = divmod(length, math.prod(word.size or 1 for word in words))
    unknown = sum(not word.size for word in words)
    if remainder or unknown > 1 or (rest > 1 and not unknown):
        raise ValueError(f"has {item} for an axis of {length}")
    return [word._replace(size=word.size or rest) for word in words]


def _check_name(name: str) -> None:
    """Refuses what is nearly `rows` or `columns`, and would be taken for an axis of a stack."""
    if name in ("rows", "columns"):
        return
    if near := difflib.get_close_matches(name.lower(), _MEANT, 1, _NEARLY):
        raise ValueError(
            f"has {name!r}, which is no name for a stack: did you mean {_MEANT[near[0]]!r}? Rows "
            "are inputs, and columns are outputs"
        )
