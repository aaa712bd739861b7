"""Matrices that are stored outputs first, so that their rows are what others call columns."""

from collections import defaultdict
from collections.abc import Sequence
import math
import re
import sys
from typing import Any

import jax

from optax_largebatch.params.blocks import Block
from optax_largebatch.params.names import is_called
from optax_largebatch.params.shapes import Pair, is_table


def by_type(params: Any) -> set[int]:
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
        if isinstance(node, kinds) and not _is_depthwise(node):
            weights |= {start + k for k, leaf in enumerate(leaves) if leaf is node.weight}
        start += len(leaves)
    return weights


def _is_depthwise(node: Any) -> bool:
    """Whether a layer of Equinox has a filter for each channel."""
    return getattr(node, "groups", 0) == getattr(node, "in_channels", 1)


def by_name(blocks: Sequence[Block]) -> dict[int, Pair]:
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
        votes_of_bias = {n: _vote_of_bias(blocks[n], biases) for n in numbers}
        votes = sum(votes_of_bias.values()) or sum(_vote_of_module(blocks[n]) for n in numbers)
        is_usual = votes > 0 or (votes == 0 and is_called("outputs first", own_name))
        for number in numbers:
            if votes_of_bias[number] > 0 or (votes_of_bias[number] == 0 and is_usual):
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
                lengths[partner] = max(block.shape, default=0)
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
