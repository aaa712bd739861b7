"""The two ends of a network: embeddings and the last layer, which Adam moves beside Muon."""

from collections import Counter
from collections.abc import Sequence
import dataclasses
import re
from typing import Any, Literal

from optax_largebatch.params.blocks import Block
from optax_largebatch.params.names import is_called
from optax_largebatch.params.paths import is_hidden
from optax_largebatch.params.rules import Rule
from optax_largebatch.params.shapes import is_table

End = Rule | Literal["by name"] | None
"""The parameters of one end: a rule, by their names, or None if there are none."""

MANY = 8
"""How many times as many rows as columns a table of words has, at least."""


def between_ends(embeddings: End, head: End) -> Rule:
    """The rule of what is neither an embedding nor the last layer.

    When it meets the parameters, it raises a ValueError if an end has no name that is known, and
    some matrix may be one.
    """
    return Rule("neither embeddings nor head", _BetweenEnds(embeddings, head))


@dataclasses.dataclass(frozen=True)
class _BetweenEnds:
    embeddings: End
    head: End

    def __call__(self, named: list[tuple[str, Any]]) -> list[bool]:
        blocks = []
        for name, leaf in named:
            shape = () if is_hidden(leaf) else getattr(leaf, "shape", ())
            blocks.append(Block.of(name, tuple(shape)))
        may_ask = not any(is_called("adapter", block.name) for block in blocks)
        if self.embeddings == "by name":
            embeddings = _embeddings_by_name(blocks, may_ask)
        else:
            embeddings = _selected(self.embeddings, named)
        if self.head == "by name":
            head = _head_by_name(blocks, embeddings, may_ask)
        else:
            head = _selected(self.head, named)
        return [not (a or b) for a, b in zip(embeddings, head, strict=True)]


def _embeddings_by_name(blocks: list[Block], may_ask: bool) -> list[bool]:
    called = [is_table(block.name) for block in blocks]
    if may_ask and not any(called):
        lonely = _with_a_length_of_their_own(blocks)
        _ask("embeddings", [block for block in blocks if _may_be_table(block, block in lonely)])
    return called


def _head_by_name(blocks: list[Block], embeddings: list[bool], may_ask: bool) -> list[bool]:
    """The last layer: by its name, or else the only matrix as long as a table of words.

    A network of bytes may have hidden layers that are as long by chance.
    """
    named = [is_called("head", block.name) for block in blocks]
    if any(named):
        return named
    tables = [block for block, flag in zip(blocks, embeddings, strict=True) if flag]
    shapes = [block.shape for block in tables if block.is_matrix]
    words = {rows for rows, columns in shapes if rows > 2 * columns}
    as_long = [
        block.is_matrix and not flag and not words.isdisjoint(block.shape)
        for block, flag in zip(blocks, embeddings, strict=True)
    ]
    if sum(as_long) == 1:
        return as_long
    if may_ask and (any(as_long) or not words):
        candidates = [block for block, flag in zip(blocks, as_long, strict=True) if flag]
        lonely = _with_a_length_of_their_own(blocks)
        _ask("head", candidates or [block for block in lonely if block not in tables])
    return named


def _selected(end: Rule | None, named: list[tuple[str, Any]]) -> list[bool]:
    return [False] * len(named) if end is None else end.select(named)


def _ask(argument: str, candidates: list[Block]) -> None:
    if candidates:
        block = candidates[-1]
        raise ValueError(
            f"{argument} must be given: no name says where they are, and {block.name!r} of shape "
            f'{block.shape} may be one. Pass {argument}=matching("..."), or {argument}=None if '
            "there are none."
        )


def _may_be_table(block: Block, is_lonely: bool) -> bool:
    """Whether a matrix of unknown name may be a table: it is in no module, or has many rows."""
    if not block.is_matrix or is_called("head", block.name):
        return False
    is_bare = "/" not in block.name.removeprefix("params/")
    return is_bare or (is_lonely and block.shape[0] > MANY * block.shape[1])


def _with_a_length_of_their_own(blocks: Sequence[Block]) -> list[Block]:
    """The matrices with a side that no other module has: only the first and last layers do.

    Modules in a list may have twins with the same numbers, as the two networks of a NeRF.
    """
    modules: dict[str, set[int]] = {}
    for block in blocks:
        module = re.sub(r"/[^/]*(/\d+)*$", "", block.name)
        key = re.sub(r".*/(?=[^/]*\d$)", "", module)
        modules.setdefault(key, set()).update(block.shape)
    counts = Counter(length for lengths in modules.values() for length in lengths)
    return [
        block for block in blocks if block.is_matrix and min(counts[n] for n in block.shape) == 1
    ]
