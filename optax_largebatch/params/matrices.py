"""Matrices among the parameters: which axes are rows and which are columns."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp

from optax_largebatch.params import outputs_first, paths
from optax_largebatch.params.blocks import Block, blocks_of
from optax_largebatch.params.fused import Fused, from_batch, read_fused, stack_of, to_batch
from optax_largebatch.params.leaves import Layout, Leaves
from optax_largebatch.params.masks import Mask, select_leaves
from optax_largebatch.params.rules import matching
from optax_largebatch.params.shapes import pair_of_attention
from optax_largebatch.params.stacked import Stacked, check_stacked, check_text_of_stack

Axes = tuple[tuple[int, ...], tuple[int, ...]] | str | None
"""The axes of rows and those of columns; or a text that says them, and more."""

MatrixAxes = Mapping[str, Any] | Callable[[Any], Any] | Any
"""Patterns, a function of the parameters, or a tree (or prefix). Each entry is a pair, the axes of
rows and the axes of columns; a text, such as `"rows (3 columns)"`, for several matrices in one; or
None for a parameter that is no matrix."""


class Matrices(NamedTuple):
    """The matrices in one parameter; the axes that are neither rows nor columns stack them."""

    rows: tuple[int, ...]
    """The axes that one multiplies over, in `inputs @ matrix`."""
    columns: tuple[int, ...]
    layout: Layout
    specs_known: bool = False
    """Whether `update` is given the spec of the parameter. If so, devices have the same along all
    other mesh axes; the array types may say so, too."""
    fused: Fused | None = None
    """What each of them is fused of, if it is."""
    by_text: bool = False
    """Whether a text says what they are, so that nobody has to ask."""

    @property
    def whole(self) -> "Matrices":
        """The same matrices, for a parameter that every device has whole."""
        nothing = tuple(() for _ in self.layout.shape)
        return self._replace(layout=self.layout._replace(mesh_axes=nothing))

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of one matrix."""
        sizes = self.layout.shape
        rows, columns = [sizes[k] for k in self.rows], [sizes[k] for k in self.columns]
        return math.prod(rows), math.prod(columns)

    @property
    def numbers(self) -> dict[tuple[int, int], int]:
        """How many matrices of each shape there are in the parameter."""
        number = math.prod(self.layout.shape[axis] for axis in self.stack)
        number *= self.fused.number if self.fused else 1
        return {shape: number * k for shape, k in Counter(self.shapes).items()}

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The rows and columns of the matrices that one is fused of, or its own."""
        return self.fused.shapes if self.fused else [self.shape]

    def spread(self, numbers: Sequence[float], dtype: jnp.dtype) -> Any:
        """A number for each of `shapes`, in an array that broadcasts over this device's shard."""
        if self.fused is None or len({*numbers}) == 1:
            return numbers[0]
        side, vector = self.fused.spread(numbers)
        axes = (self.rows, self.columns)[side]
        lengths = [n if axis in axes else 1 for axis, n in enumerate(self.layout.shape)]
        return self.layout.local_shard(jnp.asarray(vector, dtype).reshape(lengths))

    @property
    def stack(self) -> tuple[int, ...]:
        """The axes that stack matrices."""
        return stack_of(len(self.layout.shape), self.rows, self.columns)

    def to_batch(self, x: jax.Array) -> jax.Array:
        """The matrices of an array like the parameter, or their shards, as a batch."""
        return to_batch(x, self.rows, self.columns)

    def from_batch(self, matrices: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The array of this shape, the reverse of `to_batch`."""
        return from_batch(matrices, shape, self.rows, self.columns)

    def opened(self, shape: tuple[int, ...]) -> "tuple[Matrices, tuple[int, ...]] | None":
        """The matrices that these are fused of, by an axis for each part of an axis.

        Args:
            shape: of this device's shard.

        Returns:
            They, and the shape of the shard with all these axes; None if their lengths differ, or
            if a shard has only pieces of some of them.
        """
        if self.fused is None or len(self.fused.parts) > 1:
            return None
        sides, lengths = (*self.rows, *self.columns), iter(self.fused.lengths)
        pairs = zip(sides, self.fused.cuts, strict=True)
        cut = {axis: list(itertools.islice(lengths, n)) for axis, n in pairs}
        starts, opened, whole, mesh_axes = {}, [], [], []
        for axis, (here, length, names) in enumerate(zip(shape, *self.layout, strict=True)):
            first, *others = cut.get(axis, [length])
            if here % math.prod(others):
                return None
            starts[axis] = len(opened)
            opened += [here // math.prod(others), *others]
            whole += [first, *others]
            mesh_axes += [names, *[()] * len(others)]
        places = [starts[axis] + k for axis in sides for k in range(len(cut[axis]))]
        layout = Layout(tuple(whole), tuple(mesh_axes))
        rows, columns = (
            tuple(places[k] for k in side) for side in (self.fused.rows, self.fused.columns)
        )
        return self._replace(rows=rows, columns=columns, layout=layout, fused=None), tuple(opened)

    @property
    def cut_axes(self) -> tuple[int, ...]:
        """The axes that are cut between matrices inside; the columns if none is."""
        if self.fused is None:
            return ()
        sides = self.fused.cut_sides or (1,)
        return tuple(axis for side in sides for axis in (self.rows, self.columns)[side])

    def sums_of_each(self, sums: jax.Array) -> jax.Array:
        """Sums for each index along a side of the matrices, added up for each matrix."""
        if self.fused is None:
            return jnp.sum(sums, (*self.rows, *self.columns), keepdims=True)
        (side,) = self.fused.cut_sides or (1,)
        number = self.fused.numbered(side)
        batch = jnp.moveaxis(self.to_batch(sums), 1 + side, 0)
        of_matrices = jax.ops.segment_sum(batch, number, number.max() + 1)
        return self.from_batch(jnp.moveaxis(of_matrices[number], 0, 1 + side), sums.shape)

    def map(
        self, function: Callable[..., jax.Array], x: jax.Array, *numbers: jax.Array
    ) -> jax.Array:
        """The array with `function` of each matrix and `numbers` in the place of the matrix."""
        if self.fused is not None:
            function = functools.partial(self.fused.map, function)
        of_each = jax.vmap(lambda matrix: function(matrix, *numbers))
        return self.from_batch(of_each(self.to_batch(x)), x.shape)


def check_matrix_axes(matrix_axes: Any) -> None:
    """Checks, when a transformation is built, that the argument has one of the allowed forms.

    Raises:
        TypeError: the argument is a number, a string, or an array.
    """
    if isinstance(matrix_axes, bool | int | float | str | jax.Array):
        raise TypeError(
            "matrix_axes must be None, patterns such as {'conv': ((0, 1, 2), 3)}, a function of "
            "the parameters, or a tree of pairs (rows, columns) of axes; got "
            f"{matrix_axes!r} of type {type(matrix_axes).__name__}."
        )


def axes_of_matrices(matrix_axes: MatrixAxes, stacked: Stacked, params: Any) -> list[Axes]:
    """The axes of rows and of columns of each parameter, None for a parameter that is no matrix.

    Args:
        matrix_axes: the argument of this name; a parameter that it does not name is a matrix if its
            blocks have two axes.
        stacked: the stacks among the parameters.
        params: the parameters.

    Raises:
        TypeError: the entry for a parameter is neither a pair of axes nor a text.
        ValueError: an axis does not exist or is named twice, or a pattern matches nothing.
    """
    stacked = check_stacked(stacked, parts=False)
    blocks = blocks_of(params, stacked)
    pairs: list[Any] = _default_axes(blocks, params)
    if matrix_axes is None or not pairs:
        return pairs
    if is_patterns(matrix_axes):
        named = paths.named_leaves(params)
        for pattern, pair in matrix_axes.items():
            flags = _selected(pattern, named)
            pairs = [pair if flag else old for flag, old in zip(flags, pairs, strict=True)]
    else:
        tree = matrix_axes(params) if paths.is_function(matrix_axes) else matrix_axes
        pairs = paths.broadcast_prefix("matrix_axes", tree, params, _is_entry)
    return [_checked(block, pair) for block, pair in zip(blocks, pairs, strict=True)]


def said_by(matrix_axes: MatrixAxes, params: Any) -> list[bool]:
    """Whether `matrix_axes` says of each parameter what it is."""
    if not matrix_axes or not is_patterns(matrix_axes):
        return [bool(matrix_axes)] * len(jax.tree.leaves(params))
    named = paths.named_leaves(params)
    chosen = [_selected(pattern, named) for pattern in matrix_axes]
    return [any(flags) for flags in zip(*chosen, strict=True)]


def _selected(pattern: str, named: list[tuple[str, Any]]) -> list[bool]:
    """Whether a pattern of `matrix_axes` selects each leaf that is not hidden."""
    try:
        chosen = matching(pattern).select(named)
    except ValueError as error:
        raise ValueError(f"matrix_axes: {error}") from None
    return [
        flag for flag, (_, leaf) in zip(chosen, named, strict=True) if not paths.is_hidden(leaf)
    ]


def are_matrices(
    matrix_axes: MatrixAxes, stacked: Stacked, params: Any, mask: Mask = None
) -> list[bool]:
    """Whether each parameter is a matrix, or stacks matrices, and `matrix_mask` chooses it."""
    axes = axes_of_matrices(matrix_axes, stacked, params)
    if mask is None:
        return [pair is not None for pair in axes]
    chosen = select_leaves("matrix_mask", mask, stacked.blocks(params))
    return [flag and pair is not None for flag, pair in zip(chosen, axes, strict=True)]


def matrices_of(
    matrix_axes: MatrixAxes, stacked: Stacked, leaves: Leaves, who: str
) -> list[Matrices]:
    """The matrices of each parameter.

    Args:
        matrix_axes: the argument of this name.
        stacked: the stacks among the parameters.
        leaves: the parameters.
        who: the transformation, for messages.

    Raises:
        ValueError: a parameter is no matrix; or, inside `jax.shard_map`, a parameter is split and
            its type does not say along which axis.
    """
    found = []
    for index, pair in enumerate(axes_of_matrices(matrix_axes, stacked, leaves.tree)):
        if pair is None:
            name, shape = leaves.names[index], leaves.arrays[index].shape
            raise ValueError(
                f"{who} works on matrices, and {name!r} of shape {shape} is no matrix. Give its "
                "rows and columns by matrix_axes={'pattern': (rows, columns)}, or its stacked "
                "layers by stacked=, or leave it to another transformation, as muon() does."
            )
        found.append(_matrices(leaves, index, pair, who))
    return found


def with_matrices_inside(stacked: Stacked, matrix_axes: MatrixAxes) -> Stacked:
    """The stacks in which each matrix of a text of `matrix_axes` is a block."""

    def texts(params: Any) -> list[str | None]:
        axes = axes_of_matrices(matrix_axes, stacked, params)
        return [x if isinstance(x, str) else None for x in axes]

    if matrix_axes is None:
        return stacked
    return dataclasses.replace(stacked, texts=texts, texts_in="matrix_axes")


def _matrices(leaves: Leaves, index: int, pair: Any, who: str) -> Matrices:
    """The matrices of one parameter."""
    layout = leaves.layout(index, f"{who} works on whole matrices")
    by_text = isinstance(pair, str)
    name = leaves.names[index] if by_text else ""
    rows, columns, fused = (
        read_fused("matrix_axes", name, layout.shape, pair) if by_text else (*pair, None)
    )
    return Matrices(rows, columns, layout, leaves.specs is not None, fused, by_text)


def _default_axes(blocks: list[Block], params: Any) -> list[Axes]:
    """Rows and columns where nobody says them: of blocks with two axes, (inputs, outputs).

    Weights of Equinox have their outputs first, and so have its convolutions. Kernels of attention
    are known by their names.
    """
    turned = outputs_first.by_type(params)
    pairs: list[Axes] = []
    for number, block in enumerate(blocks):
        first, others = block.axes[:1], block.axes[1:]
        is_depthwise = len(block.shape) > 2 and block.shape[1] == 1
        if block.is_vector or is_depthwise:
            pairs.append(None)
        elif number in turned:
            pairs.append((others, first))
        elif len(others) == 1:
            pairs.append((first, others))
        else:
            places = pair_of_attention(block.name, len(block.shape))
            pairs.append(block.pair(places) if places else None)
    return pairs


def is_patterns(tree: Any) -> TypeGuard[dict[str, Any]]:
    """Whether `tree` maps patterns to pairs; a tree of pairs may look the same."""
    return isinstance(tree, dict) and all(
        isinstance(key, str) and _is_entry(x) for key, x in tree.items()
    )


def _is_entry(node: Any) -> bool:
    """Whether a node says which axes of a parameter are rows and columns, or that none are."""
    if node is None or isinstance(node, str):
        return True
    return isinstance(node, tuple) and len(node) == 2 and all(map(_is_axes, node))


def _is_axes(node: Any) -> bool:
    axes = node if isinstance(node, tuple | list) else (node,)
    return bool(axes) and all(type(axis) is int for axis in axes)


def _checked(block: Block, pair: Any) -> Axes:
    """The axes of a parameter, counted from 0."""
    name, ndim = block.name, len(block.axes) + len(block.stack)
    if isinstance(pair, str):
        check_text_of_stack("matrix_axes", name, pair, block.stack)
    if pair is None or isinstance(pair, str):
        return pair
    if not _is_entry(pair):
        raise TypeError(
            f"matrix_axes: the entry for {name!r} must be a pair (rows, columns) of axes, such as "
            f"(0, 1) or ((0, 1, 2), 3), a text, or None for no matrix; got {pair!r}."
        )
    rows, columns = (tuple(x) if isinstance(x, tuple | list) else (x,) for x in pair)
    if not all(-ndim <= axis < ndim for axis in (*rows, *columns)):
        raise ValueError(
            f"matrix_axes: {name!r} has {ndim} axes, and is given the pair {pair!r}. Count axes "
            "from 0, or narrow the pattern."
        )
    rows, columns = (tuple(axis % ndim for axis in axes) for axes in (rows, columns))
    if len({*rows, *columns}) < len(rows) + len(columns):
        raise ValueError(
            f"matrix_axes: for {name!r} an axis stands twice in {pair!r}. Each axis belongs to the "
            "rows, to the columns, or to neither."
        )
    return rows, columns
