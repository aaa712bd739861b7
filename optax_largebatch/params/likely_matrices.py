"""Matrices that Muon would leave to another optimizer, or turn round: what to say about them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
import warnings

import jax

from optax_largebatch.params import outputs_first
from optax_largebatch.params.blocks import Block, blocks_of
from optax_largebatch.params.masks import has_placeholders
from optax_largebatch.params.matrices import MatrixAxes, axes_of_matrices, said_by
from optax_largebatch.params.patterns import patterns_of
from optax_largebatch.params.shapes import Pair, is_first_layer, pair_of_kernel, window_of
from optax_largebatch.params.stacked import Stacked


def check_matrices(
    who: str,
    matrix_axes: MatrixAxes,
    stacked: Stacked,
    params: Any,
    chosen: Sequence[bool],
    turns_matter: bool = False,
    may_be_none: bool = False,
) -> None:
    """Warns of matrices that are none to Muon, and of those whose rows may be its columns.

    Args:
        who: the optimizer.
        matrix_axes: its argument.
        stacked: the stacks among the parameters.
        params: the parameters.
        chosen: whether each is one that Muon is to move, if it is a matrix.
        turns_matter: whether its rule for columns is another one than for rows.
        may_be_none: whether no parameter needs to be a matrix.

    Raises:
        ValueError: no parameter is a matrix.
    """
    if not jax.tree.leaves(params) or stacked.forgotten(params):
        return  # nothing to say, or it has been said what comes first
    blocks = blocks_of(params, stacked)
    pairs = axes_of_matrices(matrix_axes, stacked, params)
    asked = [a and b for a, b in zip(chosen, unsaid(matrix_axes, params), strict=True)]
    kernels = {
        number: pair
        for number, pair in kernels_of_more_axes(blocks).items()
        if asked[number] and pairs[number] is None
    }
    if kernels:
        warnings.warn(
            f"{who}: {_of_all(kernels, blocks)} have more than two axes and may be matrices, and "
            "another optimizer moves them. Say which axes are rows and columns: "
            f"{line_of_axes(matrix_axes, kernels, blocks)}. What is no matrix gets None in place "
            "of the pair. A text such as 'rows heads columns' has a matrix for each head.",
            stacklevel=2,
        )
    is_one = [flag and pair is not None for flag, pair in zip(chosen, pairs, strict=True)]
    # Where some parameters are hidden, the same optimizer may have others with matrices.
    if not any(is_one) and not may_be_none and not has_placeholders(params):
        raise ValueError(
            f"{who} moves matrices, and none of the {len(blocks)} parameters is one: they have one "
            "axis, as after optax.flatten or ravel_pytree, or matrix_mask leaves them out. Pass "
            "the tree of the network, or say by matrix_axes= which are matrices."
        )
    if turns_matter:
        warn_of_turned(who, matrix_axes, blocks, asked)


def unsaid(matrix_axes: MatrixAxes, params: Any) -> list[bool]:
    """Whether neither the argument nor a type says of each parameter what it is."""
    by_type = outputs_first.by_type(params)
    said = said_by(matrix_axes, params)
    return [not flag and number not in by_type for number, flag in enumerate(said)]


def warn_of_turned(
    who: str,
    matrix_axes: MatrixAxes,
    blocks: Sequence[Block],
    asked: Sequence[bool],
    squares: bool = False,
) -> None:
    """Warns of matrices that seem to have their outputs first, where nobody has said so.

    Args:
        who: the transformation.
        matrix_axes: its argument.
        blocks: the parameters.
        asked: whether nobody has said what each is.
        squares: whether it matters for square matrices, too.
    """
    turned = {
        number: pair for number, pair in outputs_first.by_name(blocks).items() if asked[number]
    }
    if turned and (squares or any(len({*blocks[n].shape}) > 1 for n in turned)):
        warnings.warn(
            f"{who}: {_of_all(turned, blocks)} seem to have their outputs first, and rows are "
            f"taken for inputs. Say so: {line_of_axes(matrix_axes, turned, blocks)}. If they have "
            "their inputs first, turn the pair.",
            stacklevel=2,
        )


def kernels_of_more_axes(blocks: Sequence[Block]) -> dict[int, Pair]:
    """The rows and columns of kernels with more than two axes, as well as they can be guessed.

    A first layer alone, such as that of the patches of an image, is not among them.
    """
    counted = [block for block in blocks if len(block.shape) == 1 or not block.is_vector]
    lengths = Counter(length for block in counted for length in {*block.shape} if length > 1)
    width = max(lengths, key=lambda length: (lengths[length], length), default=0)
    pairs = {}
    convolutions = []
    for number, block in enumerate(blocks):
        if len(block.shape) < 3 or block.is_vector:
            continue
        places = pair_of_kernel(block.name, block.shape, width)
        if places is not None:
            pairs[number] = block.pair(places)
            if window_of(block.name, block.shape):
                convolutions.append(number)
    first = [n for n in convolutions if is_first_layer(blocks[n].name, blocks[n].shape)]
    for number in convolutions if len(convolutions) == 1 else first:
        del pairs[number]
    return pairs


def line_of_axes(matrix_axes: MatrixAxes, pairs: Mapping[int, Any], blocks: Sequence[Block]) -> str:
    """The argument with these pairs added to what it says already, to be pasted."""
    names = [block.name for block in blocks]
    entries = dict(matrix_axes) if isinstance(matrix_axes, Mapping) else {}
    for pair in dict.fromkeys(pairs.values()):
        chosen = {number for number in pairs if pairs[number] == pair}
        rows, columns = (side[0] if len(side) == 1 else side for side in pair)
        entries |= dict.fromkeys(patterns_of(names, chosen), (rows, columns))
    return f"matrix_axes={entries!r}"


def _of_all(pairs: Mapping[int, Pair], blocks: Sequence[Block]) -> str:
    block = blocks[min(pairs)]
    return (
        f"{len(pairs)} of {len(blocks)} parameters, such as {block.name!r} of shape {block.shape},"
    )
