"""Matrices that are fused in one parameter, as queries, keys and values are, or heads."""

from collections.abc import Callable, Sequence
import difflib
import functools
import itertools
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

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

    sides: tuple[int, int]
    """The rows and columns of the fused matrix."""
    lengths: tuple[int, ...]
    """The axes that its rows, and then its columns, are cut into."""
    rows: tuple[int, ...]
    """Which of these axes are rows of a matrix inside; those that are neither rows nor columns
    count matrices."""
    columns: tuple[int, ...]
    """Which of them are columns."""
    parts: tuple[int, ...]
    """The lengths of the parts of one axis, each of which is a matrix."""
    axis: int
    """This axis."""
    cuts: tuple[int, ...]
    """Into how many axes each axis of the rows, and then of the columns, is cut."""

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The rows and columns of the matrices in each part."""

        def side(axes: tuple[int, ...], part: int) -> int:
            return math.prod(part if k == self.axis else self.lengths[k] for k in axes)

        return [(side(self.rows, part), side(self.columns, part)) for part in self.parts]

    @property
    def number(self) -> int:
        """How many matrices each part has."""
        sides = (*self.rows, *self.columns)
        return math.prod(x for k, x in enumerate(self.lengths) if k not in sides)

    def spread(self, numbers: Sequence[float]) -> tuple[int, np.ndarray]:
        """A number for each part, along the side that has the parts: which side, and a vector."""
        return self._along_side(self.axis, np.repeat(numbers, self.parts))

    @property
    def cut_sides(self) -> tuple[int, ...]:
        """The sides that are cut between matrices: 0 for the rows and 1 for the columns."""
        return tuple(sorted({side for side, _ in self._cuts()}))

    def numbered(self, side: int) -> np.ndarray:
        """For each index along a side the number of its matrix, as far as this side is cut."""
        vectors = (vector for cut, vector in self._cuts() if cut == side)
        first = np.zeros(self.sides[side], int)
        return functools.reduce(lambda n, x: n * (x.max() + 1) + x, vectors, first)

    def _cuts(self) -> list[tuple[int, np.ndarray]]:
        """For each axis that is cut its side, and for each index along that a number of a part."""
        sides = (*self.rows, *self.columns)
        cut = [k for k, n in enumerate(self.lengths) if k not in sides and n > 1]
        numbered = {k: np.arange(self.lengths[k]) for k in cut}
        if len(self.parts) > 1:
            numbered[self.axis] = np.repeat(np.arange(len(self.parts)), self.parts)
        return [self._along_side(k, x) for k, x in sorted(numbered.items())]

    def _along_side(self, axis: int, values: Any) -> tuple[int, np.ndarray]:
        """Values along one of the axes, for each index along its side: which side, and a vector."""
        before = math.prod(self.lengths[:axis])
        side = int(before >= self.sides[0])  # 1 for the columns
        before //= self.sides[0] if side else 1
        after = self.sides[side] // (before * self.lengths[axis])
        return side, np.tile(np.repeat(values, after), before)

    def map(
        self, function: Callable[..., jax.Array], matrix: jax.Array, *numbers: Any
    ) -> jax.Array:
        """The fused matrix, with `function` of each matrix inside in the place of that matrix.

        Args:
            function: takes a matrix and `numbers`.
            matrix: the fused matrix, or the transposed one.
            *numbers: of this step.
        """
        is_transposed = matrix.shape != self.sides
        x = (matrix.T if is_transposed else matrix).reshape(self.lengths)
        of_each = jax.vmap(lambda one: function(one, *numbers))
        done = []
        for part in jnp.split(x, list(itertools.accumulate(self.parts))[:-1], self.axis):
            matrices = of_each(to_batch(part, self.rows, self.columns))
            done.append(from_batch(matrices, part.shape, self.rows, self.columns))
        result = jnp.concatenate(done, self.axis).reshape(self.sides)
        return result.T if is_transposed else result


def to_batch(x: jax.Array, rows: Sequence[int], columns: Sequence[int]) -> jax.Array:
    """The matrices of an array as a batch; its other axes stack them."""
    groups = (stack_of(x.ndim, rows, columns), rows, columns)
    lengths = [math.prod([x.shape[axis] for axis in axes]) for axes in groups]
    return jnp.transpose(x, list(itertools.chain(*groups))).reshape(lengths)


def from_batch(
    matrices: jax.Array, shape: tuple[int, ...], rows: Sequence[int], columns: Sequence[int]
) -> jax.Array:
    """The array of this shape, the reverse of `to_batch`."""
    order = [*stack_of(len(shape), rows, columns), *rows, *columns]
    turned = matrices.reshape([shape[axis] for axis in order])
    return jnp.transpose(turned, np.argsort(order).tolist())


def stack_of(ndim: int, rows: Sequence[int], columns: Sequence[int]) -> tuple[int, ...]:
    """The axes that are neither rows nor columns."""
    return tuple([axis for axis in range(ndim) if axis not in (*rows, *columns)])


class _Word(NamedTuple):
    """A word of the text, with the length of its part of an axis."""

    kind: str
    length: int
    """0 where the text does not say it."""
    parts: tuple[int, ...]


def read_fused(
    argument: str, name: str, shape: tuple[int, ...], text: str
) -> tuple[tuple[int, ...], tuple[int, ...], Fused | None]:
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


def _read(
    text: str, shape: tuple[int, ...], least_sides: int
) -> tuple[tuple[int, ...], tuple[int, ...], Fused | None]:
    items = _ITEM.findall(text)
    if _ITEM.sub("", text).strip():
        raise ValueError("has parentheses that are not in pairs, or one pair inside another")
    if len(items) != len(shape):
        raise ValueError(f"has {len(items)} items for {len(shape)} axes")
    cut = [_words(item, length) for item, length in zip(items, shape, strict=True)]
    axes = {
        side: tuple(axis for axis, words in enumerate(cut) if any(x.kind == side for x in words))
        for side in ("rows", "columns")
    }
    order = (*axes["rows"], *axes["columns"])
    if sum(map(bool, axes.values())) < least_sides or len({*order}) < len(order):
        raise ValueError("must have an axis with rows, and another one with columns")
    words = [word for axis in order for word in cut[axis]]
    unequal = [k for k, word in enumerate(words) if word.parts]
    if len(unequal) > 1:
        raise ValueError("may have one sum of parts")
    if len(words) == len(order) and not unequal:
        return axes["rows"], axes["columns"], None
    if 0 in shape:
        raise ValueError("cuts an array without elements")
    rows, columns = (tuple(k for k, word in enumerate(words) if word.kind == side) for side in axes)
    height, width = (math.prod(shape[axis] for axis in side) for side in axes.values())
    lengths = tuple(word.length for word in words)
    part_axis = unequal[0] if unequal else 0
    parts = words[part_axis].parts or lengths[:1]
    cuts = tuple(len(cut[axis]) for axis in order)
    fused = Fused((height, width), lengths, rows, columns, parts, part_axis, cuts)
    return axes["rows"], axes["columns"], fused


def stacks_in(text: str) -> tuple[int, ...]:
    """The axes of a text that stack matrices."""
    is_side = re.compile(r"\b(rows|columns)\b").search
    return tuple(axis for axis, item in enumerate(_ITEM.findall(text)) if not is_side(item))


def _words(item: str, length: int) -> list[_Word]:
    """The parts that an item cuts an axis of this length into."""
    known: list[_Word] = []
    for word in item.strip("()").split():
        if not _WORD.fullmatch(word):
            raise ValueError(f"has {word!r}, which is no number, no name, and no sum of parts")
        kind, _, written = word.partition("=")
        _check_name(kind)
        parts = tuple(map(int, written.split("+"))) if written else ()
        if len(parts) > 1 and len({*parts}) == 1:  # equal parts, which devices may share
            known.append(_Word(str(len(parts)), len(parts), ()))
            parts = parts[:1]
        said = int(kind) if kind.isdigit() else sum(parts)
        known.append(_Word(kind, said, parts if len(parts) > 1 else ()))
    if not known:
        raise ValueError(f"has {item}, in which there is no word")
    rest, remainder = divmod(length, math.prod(word.length or 1 for word in known))
    unknown = sum(not word.length for word in known)
    if remainder or unknown > 1 or (rest > 1 and not unknown):
        raise ValueError(f"has {item} for an axis of {length}")
    return [word._replace(length=word.length or rest) for word in known]


def _check_name(name: str) -> None:
    """Refuses what is nearly `rows` or `columns`, and would be taken for an axis of a stack."""
    if name in ("rows", "columns"):
        return
    if near := difflib.get_close_matches(name.lower(), _MEANT, 1, _NEARLY):
        raise ValueError(
            f"has {name!r}, which is no name for a stack: did you mean {_MEANT[near[0]]!r}? Rows "
            "are inputs, and columns are outputs"
        )
