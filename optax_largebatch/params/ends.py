"""The two ends of a network: embeddings and the last layer, which Adam moves."""

from collections import Counter
from collections.abc import Sequence
import dataclasses
import itertools
import re
from typing import Literal

from optax_largebatch.params.blocks import Block
from optax_largebatch.params.names import is_called
from optax_largebatch.params.paths import Named
from optax_largebatch.params.rules import Rule
from optax_largebatch.params.shapes import Shape, is_table

End = Rule | Literal["by name"] | None
"""The parameters of one end: a rule, by their names, or None if there are none."""

INSIDE = ("heads of inputs", "three matrices", "two matrices", "more outputs", "router")
"""The kinds of matrices that may have a length of their own inside of a layer."""

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

    def __call__(self, named: Named) -> list[bool]:
        blocks = [Block.of(name, tuple(getattr(leaf, "shape", ()))) for name, leaf in named]
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
        modules = _modules_with_a_length(blocks)
        matrices = [x for x in blocks if x.is_matrix and not is_called("head", x.name)]
        tables = [x for x in matrices if _is_bare(x) or _is_long(x.shape, modules)]
        _ask("embeddings", tables)
    return called


def _head_by_name(
    blocks: list[Block],
    embeddings: list[bool],
    may_ask: bool,
) -> list[bool]:
    """The last layer: by its name, or the only other matrix as long as a table of words."""
    called = [is_called("head", block.name) for block in blocks]
    if any(called):
        return called
    tables = list(itertools.compress(blocks, embeddings))
    others = [block for block in blocks if block not in tables]
    shapes = [block.shape for block in tables if block.is_matrix]
    words = {rows for rows, columns in shapes if rows > 2 * columns}
    as_long = [x for x in others if x.is_matrix and not words.isdisjoint(x.shape)]
    if len(as_long) == 1:
        return [block == as_long[0] for block in blocks]
    if may_ask:
        width = max((columns for _, columns in shapes), default=0)
        _ask("head", _may_be_head(others, width if words else None))
    return [False] * len(blocks)


def _may_be_head(others: list[Block], width: int | None) -> list[Block]:
    """The matrices that may be the last layer, though no name says so.

    Beside a table of words, that may be the table itself, or a layer with a few classes.

    Args:
        others: what is no embedding.
        width: the length of an embedding; None if there is no table of words.
    """
    matrices = [block for block in others if block.is_matrix]
    if width is None:
        modules = _modules_with_a_length(others)
        return [x for x in matrices if _is_bare(x) or min(modules[n] for n in x.shape) == 1]
    modules = _modules_with_a_length(matrices)
    few = {n for n, number in modules.items() if number == 1 and n < width}
    return [
        x
        for x in matrices
        if not few.isdisjoint(x.shape)
        and not ("/" in x.name and any(is_called(kind, x.name) for kind in INSIDE))
    ]


def _selected(end: Rule | None, named: Named) -> list[bool]:
    return [False] * len(named) if end is None else end.select(named)


def _ask(argument: str, candidates: list[Block]) -> None:
    if candidates:
        block = candidates[-1]
        raise ValueError(
            f"{argument} must be given: no name says where they are, and {block.name!r} of shape "
            f'{block.shape} may be one. Pass {argument}=matching("..."), or {argument}=None if '
            "there are none."
        )


def _is_long(shape: Shape, modules: Counter[int]) -> bool:
    """Whether a matrix has as many rows as a table of words, which no other module has."""
    rows, columns = shape
    return modules[rows] == 1 and rows > MANY * columns


def _is_bare(block: Block) -> bool:
    """Whether a matrix is in no module."""
    return "/" not in block.name.removeprefix("params/")


def _modules_with_a_length(blocks: Sequence[Block]) -> Counter[int]:
    """In how many modules a side has each length: only that of a first or last layer is in one.

    Modules in a list may have twins with the same numbers, as the two networks of a NeRF.
    """
    modules: dict[str, set[int]] = {}
    for block in blocks:
        module = re.sub(r"/[^/]*(/\d+)*$", "", block.name)
        key = re.sub(r".*/(?=[^/]*\d$)", "", module)
        modules.setdefault(key, set()).update(block.shape)
    return Counter(length for lengths in modules.values() for length in lengths)
