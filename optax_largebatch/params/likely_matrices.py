"""Matrices that Muon would leave to another optimizer, or turn round: what to say about them."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
import math
import re
from typing import Any
import warnings

import jax

from optax_largebatch.params.blocks import Block
from optax_largebatch.params.likely_stacks import forgotten
from optax_largebatch.params.matrix_axes import ParamAxes
from optax_largebatch.params.names import is_called
from optax_largebatch.params.paths import has_placeholders
from optax_largebatch.params.patterns import patterns_of
from optax_largebatch.params.shapes import Pair, is_first_layer, is_table, pair_of_kernel, window_of


def check_matrices(
    who: str,
    axes: ParamAxes,
    params: Any,
    chosen: Sequence[bool],
    turns_matter: bool = False,
    may_be_none: bool = False,
) -> None:
    """Warns of matrices that are none to Muon, and of those whose rows may be its columns.

    Args:
        who: the optimizer.
        axes: what is said of rows, columns and stacks.
        params: the parameters.
        chosen: whether each is one that Muon is to move, if it is a matrix.
        turns_matter: whether its rule for columns is another one than for rows.
        may_be_none: whether no parameter needs to be a matrix.

    Raises:
        ValueError: no parameter is a matrix.
    """
    if not jax.tree.leaves(params) or forgotten(axes.stacked, params):
        return  # nothing to say, or it has been said what comes first
    blocks = axes.blocks(params)
    kernels = {
        number: pair
        for number, pair in kernels_of_more_axes(blocks).items()
        if chosen[number] and not blocks[number].is_said and blocks[number].sides is None
    }
    if kernels:
        line = line_of_axes(axes.entries.by_pattern, kernels, blocks)
        warnings.warn(
            f"{who}: {_of_all(kernels, blocks)} have more than two axes and may be matrices, and "
            "another optimizer moves them. Say which axes are rows and columns: "
            f"{line}. What is no matrix gets None in place of the pair. A text such as "
            "'rows heads columns' has a matrix for each head.",
            stacklevel=2,
        )
    pairs = zip(chosen, blocks, strict=True)
    has_matrices = any(flag and block.sides is not None for flag, block in pairs)
    # Where some parameters are hidden, the same optimizer may have others with matrices.
    if not has_matrices and not may_be_none and not has_placeholders(params):
        raise ValueError(
            f"{who} moves matrices, and none of the {len(blocks)} parameters is one: they have one "
            "axis, as after optax.flatten or ravel_pytree, or matrix_mask leaves them out. Pass "
            "the tree of the network, or say by matrix_axes= which are matrices."
        )
    if turns_matter:
        warn_of_turned(who, axes, params, chosen)


def warn_of_turned(
    who: str,
    axes: ParamAxes,
    params: Any,
    chosen: Sequence[bool] | None = None,
) -> None:
    """Warns of matrices that seem to have their outputs first, where nobody has said so.

    Args:
        who: the transformation.
        axes: what is said of rows, columns and stacks.
        params: the parameters.
        chosen: whether it moves each, if it is a matrix and is not square; None if it moves all,
            and rows and columns of square ones are not the same to it either.
    """
    blocks = axes.blocks(params)
    turned = {
        number: pair
        for number, pair in turned_by_name(blocks).items()
        if not blocks[number].is_said and (chosen is None or chosen[number])
    }
    if turned and (chosen is None or any(len({*blocks[n].shape}) > 1 for n in turned)):
        line = line_of_axes(axes.entries.by_pattern, turned, blocks)
        warnings.warn(
            f"{who}: {_of_all(turned, blocks)} seem to have their outputs first, and rows are "
            f"taken for inputs. Say so: {line}. If they have their inputs first, turn the pair.",
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
    for number, block in enumerate(blocks):
        if len(block.shape) < 3 or block.is_vector:
            continue
        places = pair_of_kernel(block.name, block.shape, width)
        if places is not None:
            pairs[number] = block.pair(places)
    convolutions = [n for n in pairs if window_of(blocks[n].name, blocks[n].shape)]
    is_alone = len(convolutions) == 1
    for number in convolutions:
        if is_first_layer(blocks[number].name, blocks[number].shape, is_alone):
            del pairs[number]
    return pairs


def line_of_axes(
    by_pattern: Iterable[tuple[str, Any]],
    pairs: Mapping[int, Pair],
    blocks: Sequence[Block],
) -> str:
    """`matrix_axes` with these pairs added to what it says already, to be pasted."""
    names = [block.name for block in blocks]
    entries = dict(by_pattern)
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


def turned_by_name(blocks: Sequence[Block]) -> dict[int, Pair]:
    """The blocks of two axes that seem to have their outputs first, each with rows and columns.

    A bias tells, which is as long as the axis of outputs, or the module: the first layer of an MLP
    has more outputs than inputs. Arrays of one name are taken for alike where one cannot tell. If
    none of a name can, arrays called `weight` have their outputs first.
    """
    biases = _lengths_of_biases(blocks)
    by_own_name: dict[str, list[int]] = defaultdict(list)
    for number, block in enumerate(blocks):
        if block.is_matrix and not is_table(block.name):
            by_own_name[re.sub(r"[^A-Za-z].*", "", _own(block.name))].append(number)
    turned: dict[int, Pair] = {}
    for own_name, numbers in by_own_name.items():
        of_biases = {n: _vote_of_bias(blocks[n], biases) for n in numbers}
        votes = sum(of_biases.values()) or sum(_vote_of_module(blocks[n]) for n in numbers)
        usual = votes or is_called("outputs first", own_name)
        for number, vote in of_biases.items():
            if (vote or usual) > 0:
                turned[number] = blocks[number].pair(((1,), (0,)))
    return turned


def _lengths_of_biases(blocks: Sequence[Block]) -> dict[str, int]:
    """The lengths of biases by the names of what they are added to, as `_partner` gives them.

    Of two arrays in a list, as in `[(weights, biases), ...]`, the vector is the bias.
    """
    lists: dict[str, list[Block]] = defaultdict(list)
    lengths: dict[str, int] = {}
    for block in blocks:
        if _own(block.name).isdigit():
            lists[module_of(block.name)].append(block)
        elif block.is_vector and max(block.shape, default=0) == math.prod(block.shape):
            partner = _partner(block.name, "biases|bias|b")
            if partner is not None:
                lengths[partner] = math.prod(block.shape)
    for module, pair in lists.items():
        vectors = [block for block in pair if len(block.shape) == 1]
        if len(pair) == 2 and len(vectors) == 1:
            lengths[f"{module}/"] = vectors[0].shape[0]
    return lengths


def _partner(name: str, words: str) -> str | None:
    """A name without what says that it is a bias, or a weight; None if nothing does.

    So `layer/w1` and `layer/b1` are partners, and `W_in` and `b_in`, and `out_w` and `out_b`.
    """
    own = _own(name)
    rest = re.sub(rf"^({words})(?=[_\d]|$)|_({words})$", "", own, flags=re.IGNORECASE)
    return None if rest == own else f"{module_of(name)}/{rest.strip('_')}"


def module_of(name: str) -> str:
    """The name without its last key."""
    return name.rpartition("/")[0]


def _own(name: str) -> str:
    return name.rpartition("/")[2]


def _vote_of_bias(block: Block, biases: dict[str, int]) -> int:
    """1 if its bias is as long as the first axis alone, -1 for the second, 0 if none.

    At the root, a bias need not be that of a kernel.
    """
    alone = f"{module_of(block.name)}/"
    partner = _partner(block.name, "weights?|kernel|w") or alone
    length = None if partner == alone == "/" else biases.get(partner, biases.get(alone))
    return (block.shape[0] == length) - (block.shape[1] == length)


def _vote_of_module(block: Block) -> int:
    """The same by the name of the module, which says whether it has more outputs than inputs."""
    name = _own(module_of(block.name))
    is_high = (block.shape[0] > block.shape[1]) - (block.shape[0] < block.shape[1])
    return is_high * (is_called("more outputs", name) - is_called("fewer outputs", name))
