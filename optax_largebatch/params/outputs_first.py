"""Matrices that are stored outputs first, so that their rows are what others call columns."""

from collections import defaultdict
from collections.abc import Sequence
import re
import sys
from typing import Any

import jax

from optax_largebatch.params.blocks import Block
from optax_largebatch.params.names import is_called
from optax_largebatch.params.shapes import Pair, is_table


def by_type(params: Any) -> set[int]:
    """The numbers of the weights that are in a `Linear` or `Conv` of Equinox, as far as there are.

    Nobody has to say what the tree says by its types.
    """
    equinox = sys.modules.get("equinox")
    if equinox is None:
        return set()
    kinds = (equinox.nn.Linear, equinox.nn.Conv)
    weights: set[int] = set()
    start = 0
    for node in jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, kinds)):
        leaves = jax.tree.leaves(node)
        if isinstance(node, kinds):
            weights |= {start + k for k, leaf in enumerate(leaves) if leaf is node.weight}
        start += len(leaves)
    return weights


def by_name(blocks: Sequence[Block]) -> dict[int, Pair]:
    """The blocks of two axes that seem to have their outputs first, each with rows and columns.

    A bias tells, which is as long as the axis of outputs, or the module: the first layer of an MLP
    has more outputs than inputs. Arrays of one name are taken for alike where one cannot tell. If
    none of a name can, arrays called `weight` have their outputs first.
    """
    biases = {
        module_of(block.name): max(block.shape)
        for block in blocks
        if re.search(r"(^|/)(bias|b)$", block.name) and len(block.shape) == 1
    }
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


def module_of(name: str) -> str:
    """The name without its last key."""
    return name.rpartition("/")[0]


def _own(name: str) -> str:
    return name.rpartition("/")[2]


def _vote_of_bias(block: Block, biases: dict[str, int]) -> int:
    """1 if the bias of its module is as long as the first axis alone, -1 for the second, or 0."""
    length = biases.get(module_of(block.name))
    return (block.shape[0] == length) - (block.shape[1] == length)


def _vote_of_module(block: Block) -> int:
    """The same by the name of the module, which says whether it has more outputs than inputs."""
    name = _own(module_of(block.name)) or block.name
    is_high = (block.shape[0] > block.shape[1]) - (block.shape[0] < block.shape[1])
    return is_high * (is_called("more outputs", name) - is_called("fewer outputs", name))
