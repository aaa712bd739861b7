"""Matrices that are fused in one parameter, as queries, keys and values are, or heads."""

from collections.abc import Callable, Collection, Sequence
import difflib
import itertools
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_largebatch import norms
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
        shapes = []
        for segment in self.segments:
            lengths = list(self.lengths)
            lengths[self.segmented] = segment
            rows = math.prod(norms.lengths_along(lengths, self.rows))
            columns = math.prod(norms.lengths_along(lengths, self.columns))
            shapes.append((rows, columns))
        return shapes

    @property
    def number(self) -> int:
        """How many matrices each segment has."""
        lengths = self.lengths
        others = norms.other_axes(len(lengths), (*self.rows, *self.columns))
        return math.prod(norms.lengths_along(lengths, others))

    @property
    def cut_axes(self) -> Axes:
        """The axes that are cut between matrices."""
        return tuple(axis for axis in range(len(self.words)) if self.ids_along([axis]).any())

    @property
    def sides(self) -> tuple[range, range]:
        """The axes of its rows, and those of its columns."""
        return range(self.row_axes), range(self.row_axes, len(self.words))

    def ids_along(self, axes: Collection[int]) -> np.ndarray:
        """For each index along some axes the number of its matrix, as far as they are cut."""
        whole = {*self.rows, *self.columns} - {self.segmented}
        return self._ids(axes, {*range(len(self.lengths))} - whole)

    def spread(self, values: Sequence[float]) -> tuple[int, np.ndarray]:
        """A value for each segment, along the axis that has them: which axis, and a vector."""
        axis = self._axes[self.segmented]
        return axis, np.asarray(values)[self._ids([axis], {self.segmented})]

    @property
    def _axes(self) -> list[int]:
        """The axis of each word."""
        return [axis for axis, lengths in enumerate(self.words) for _ in lengths]

    def _ids(
        self,
        axes: Collection[int],
        counting: Collection[int],
    ) -> np.ndarray:
        """The numbers of `ids_along`, if some of the words count matrices."""
        ids = np.zeros(1, int)
        for k, (axis, length) in enumerate(zip(self._axes, self.lengths, strict=True)):
            if axis not in axes:
                continue
            of_word = np.arange(length)
            if k not in counting:
                of_word = np.zeros(length, int)
            elif k == self.segmented:
                of_word = np.repeat(np.arange(len(self.segments)), self.segments)
            ids = np.add.outer(ids * (of_word.max() + 1), of_word).ravel()
        return ids

    def map(
        self,
        function: Callable[..., jax.Array],
        matrix: jax.Array,
        *scalars: Any,
    ) -> jax.Array:
        """The fused matrix, with `function` of each matrix inside in the place of that matrix.

        Args:
            function: takes a matrix and `scalars`.
            matrix: the fused matrix, or the transposed one.
            *scalars: of this step.
        """
        shape = tuple(len(self.ids_along(axes)) for axes in self.sides)
        is_transposed = matrix.shape != shape
        upright = matrix.T if is_transposed else matrix
        of_each = jax.vmap(lambda inner: function(inner, *scalars))
        starts = np.cumsum(self.segments)[:-1].tolist()
        opened = upright.reshape(self.lengths)
        mapped = []
        for segment in jnp.split(opened, starts, self.segmented):
            matrices = of_each(to_batch(segment, self.rows, self.columns))
            mapped.append(from_batch(matrices, segment.shape, self.rows, self.columns))
        result = jnp.concatenate(mapped, self.segmented).reshape(shape)
        return result.T if is_transposed else result


def to_batch(
    x: jax.Array,
    rows: Sequence[int],
    columns: Sequence[int],
) -> jax.Array:
    """The matrices of an array as a batch; its other axes stack them."""
    stack = norms.other_axes(x.ndim, (*rows, *columns))
    turned = jnp.transpose(x, (*stack, *rows, *columns))
    lengths = [norms.lengths_along(x.shape, axes) for axes in (stack, rows, columns)]
    return turned.reshape(*map(math.prod, lengths))


def from_batch(
    matrices: jax.Array,
    shape: Shape,
    rows: Sequence[int],
    columns: Sequence[int],
) -> jax.Array:
    """The array of this shape, the reverse of `to_batch`."""
    sides = (*rows, *columns)
    order = [*norms.other_axes(len(shape), sides), *sides]
    turned = matrices.reshape(norms.lengths_along(shape, order))
    return jnp.transpose(turned, np.argsort(order).tolist())


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

    rows = axes_with("rows")
    columns = axes_with("columns")
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
    of_rows = tuple(k for k, word in enumerate(words) if word.name == "rows")
    of_columns = tuple(k for k, word in enumerate(words) if word.name == "columns")
    (segmented,) = unequal or (*of_rows, *of_columns)[:1]
    fused = Fused(
        words=tuple(tuple(word.size for word in of_axes[axis]) for axis in order),
        row_axes=len(rows),
        rows=of_rows,
        columns=of_columns,
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
        if len({*segments}) > 1:
            words.append(Word(name, sum(segments), segments))
            continue
        if len(segments) > 1:  # equal ones, which devices may share
            words.append(Word(str(len(segments)), len(segments)))
        size = int(name) if name.isdigit() else sum(segments[:1])
        words.append(Word(name, size))
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
