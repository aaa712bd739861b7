"""What `stacked` and `matrix_axes` say of the axes of each parameter."""

from collections.abc import Callable, Mapping
import dataclasses
import sys
from typing import Any, Literal, NamedTuple

import jax

from optax_largebatch.params.blocks import Block, blocks_of
from optax_largebatch.params.fused import Sides, check_text, read_fused
from optax_largebatch.params.leaves import Leaves
from optax_largebatch.params.masks import Mask, select_leaves
from optax_largebatch.params.matrices import Matrices
from optax_largebatch.params.paths import of_shapes
from optax_largebatch.params.patterns import Entries, entries_of
from optax_largebatch.params.shapes import pair_of_attention
from optax_largebatch.params.stacked import Stacked, check_stacked

MatrixAxes = Mapping[str, Any] | Callable[[Any], Any] | Any
"""Patterns, a function of the parameters, or a tree (or prefix). Each entry is a pair, the axes of
rows and the axes of columns; a text, such as `"rows (3 columns)"`, for several matrices in one; or
None for a parameter that is no matrix."""


class ParamAxes(NamedTuple):
    """What both arguments say of the axes of parameters, checked."""

    stacked: Stacked
    entries: Entries
    """The rows and columns of the parameters that `matrix_axes` names."""

    def blocks(self, params: Any) -> list[Block]:
        """The block of each parameter, with its rows and columns if it is a matrix.

        Raises:
            TypeError: the entry for a parameter is neither a pair of axes nor a text.
            ValueError: an axis does not exist or is named twice, or a pattern matches nothing.
        """
        return _blocks(params, self)

    def are_matrices(self, params: Any, mask: Mask) -> list[bool]:
        """Whether each parameter is a matrix, or stacks matrices, and `matrix_mask` chooses it."""
        are_matrices = [block.sides is not None for block in self.blocks(params)]
        if mask is None:  # the rest is looked up in each step that is traced
            return are_matrices
        chosen = select_leaves("matrix_mask", mask, self.stacked.blocks(params))
        return [flag and is_matrix for flag, is_matrix in zip(chosen, are_matrices, strict=True)]

    def matrices(self, leaves: Leaves, who: str) -> list[Matrices]:
        """The matrices of each parameter.

        Args:
            leaves: the parameters.
            who: the transformation, for messages.

        Raises:
            ValueError: a parameter is no matrix; or, inside `jax.shard_map`, a parameter is split
                and its type does not say along which axis.
        """
        matrices = []
        for index, block in enumerate(self.blocks(leaves.tree)):
            if block.sides is None:
                raise ValueError(
                    f"{who} works on matrices, and {block.name!r} of shape "
                    f"{leaves.arrays[index].shape} is no matrix. Give its rows and columns by "
                    "matrix_axes={'pattern': (rows, columns)}, or its stacked layers by stacked=, "
                    "or leave it to another transformation, as muon() does."
                )
            sharding = leaves.sharding(index, f"{who} works on whole matrices")
            sides = block.sides
            if isinstance(sides, str):
                sides = read_fused(_NAME, block.name, sharding.shape, sides)
            matrices.append(
                Matrices(
                    sides.rows,
                    sides.columns,
                    sharding,
                    specs_known=leaves.specs is not None,
                    fused=sides.fused,
                    by_text=isinstance(block.sides, str),
                )
            )
        return matrices

    @property
    def stacked_matrices(self) -> Stacked:
        """The stacks in which each matrix of a text is a block."""
        if self.entries.says_nothing:
            return self.stacked
        return dataclasses.replace(self.stacked, texts=self.entries)


def check_axes(
    matrix_axes: MatrixAxes,
    stacked: Any,
    if_forgotten: Literal["warning", "error"] = "warning",
) -> ParamAxes:
    """What the arguments of these names say, after checking their forms.

    Args:
        matrix_axes: a parameter that it does not name is a matrix if its blocks have two axes.
        stacked: the stacks among the parameters.
        if_forgotten: as in `check_stacked`.

    Raises:
        TypeError: an argument has no allowed form.
        ValueError: `stacked` has a text.
    """
    stacks = check_stacked(stacked, if_forgotten, segments=False)
    if isinstance(matrix_axes, bool | int | float | str | jax.Array):
        raise TypeError(
            "matrix_axes must be None, patterns such as {'conv': ((0, 1, 2), 3)}, a function of "
            "the parameters, or a tree of pairs (rows, columns) of axes; got "
            f"{matrix_axes!r} of type {type(matrix_axes).__name__}."
        )
    return ParamAxes(stacks, entries_of(_NAME, matrix_axes, _is_entry))


def matrices_of(
    matrix_axes: MatrixAxes,
    stacked: Stacked,
    leaves: Leaves,
    who: str,
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
    return check_axes(matrix_axes, stacked).matrices(leaves, who)


_NAME = "matrix_axes"


@of_shapes
def _blocks(params: Any, axes: ParamAxes) -> list[Block]:
    turned = _outputs_first(params)
    blocks = blocks_of(params, axes.stacked)
    described = []
    for number, entries in enumerate(axes.entries.of(params)):
        block = blocks[number]
        is_turned = number in turned
        sides = _checked(block, entries[-1]) if entries else _sides(block, is_turned)
        described.append(block._replace(sides=sides, is_said=is_turned or bool(entries)))
    return described


def _sides(block: Block, is_turned: bool) -> Sides | None:
    """Rows and columns where nobody says them: of blocks with two axes, (inputs, outputs).

    Weights of Equinox have their outputs first, and so have its convolutions. Kernels of attention
    are known by their names.
    """
    first = block.axes[:1]
    others = block.axes[1:]
    if block.is_vector:
        return None
    if is_turned:
        return Sides(others, first)
    if len(others) == 1:
        return Sides(first, others)
    pair = pair_of_attention(block.name, len(block.shape))
    return Sides(*block.pair(pair)) if pair else None


def _outputs_first(params: Any) -> set[int]:
    """The numbers of the weights in `Linear`, `Conv` and `ConvTranspose` of Equinox.

    Nobody has to say what the tree says by its types. Depthwise weights are not among them: their
    type says what they are, and inside of `jax.shard_map` their lengths may not.
    """
    equinox = sys.modules.get("equinox")
    if equinox is None:
        return set()
    kinds = (equinox.nn.Linear, equinox.nn.Conv, equinox.nn.ConvTranspose)
    weights: set[int] = set()
    start = 0
    for node in jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, kinds)):
        leaves = jax.tree.leaves(node)
        is_depthwise = getattr(node, "groups", 0) == getattr(node, "in_channels", 1)
        if isinstance(node, kinds) and not is_depthwise:
            weights |= {start + k for k, leaf in enumerate(leaves) if leaf is node.weight}
        start += len(leaves)
    return weights


def _is_entry(node: Any) -> bool:
    """Whether a node says which axes of a parameter are rows and columns, or that none are."""
    if node is None or isinstance(node, str):
        return True
    return isinstance(node, tuple) and len(node) == 2 and all(map(_is_axes, node))


def _is_axes(node: Any) -> bool:
    axes = node if isinstance(node, tuple | list) else (node,)
    return bool(axes) and all(type(axis) is int for axis in axes)


def _checked(block: Block, entry: Any) -> Sides | str | None:
    """The axes of rows and columns that an entry says, counted from 0, or its text."""
    if isinstance(entry, str):
        check_text(_NAME, entry, block.name, block.stack)
    if entry is None or isinstance(entry, str):
        return entry
    if not _is_entry(entry):
        raise TypeError(
            f"matrix_axes: the entry for {block.name!r} must be a pair (rows, columns) of axes, "
            "such as (0, 1) or ((0, 1, 2), 3), a text, or None for no matrix; got "
            f"{entry!r}."
        )
    rows, columns = (tuple(x) if isinstance(x, tuple | list) else (x,) for x in entry)
    ndim = len(block.axes) + len(block.stack)
    if not all(-ndim <= axis < ndim for axis in (*rows, *columns)):
        raise ValueError(
            f"matrix_axes: {block.name!r} has {ndim} axes, and is given the pair {entry!r}. Count "
            "axes from 0, or narrow the pattern."
        )
    rows, columns = (tuple(axis % ndim for axis in axes) for axes in (rows, columns))
    if len({*rows, *columns}) < len(rows) + len(columns):
        raise ValueError(
            f"matrix_axes: for {block.name!r} an axis stands twice in {entry!r}. Each axis belongs "
            "to the rows, to the columns, or to neither."
        )
    return Sides(rows, columns)
