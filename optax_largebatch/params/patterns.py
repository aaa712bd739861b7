"""What an argument says of each parameter by patterns or a tree, and short patterns to paste."""

from collections.abc import Callable, Collection, Sequence
import itertools
import re
from typing import Any, NamedTuple, TypeGuard

import jax

from optax_largebatch.params import paths
from optax_largebatch.params.rules import matching

IsEntry = Callable[[Any], bool]
"""Whether something is what an argument says of one parameter."""


class Entries(NamedTuple):
    """What an argument says of the parameters. It is data, if its entries are."""

    argument: str
    """The name of the argument, for messages."""
    is_entry: IsEntry
    by_pattern: tuple[tuple[str, Any], ...] = ()
    tree_of: Callable[[Any], Any] | None = None
    """From the parameters to a tree of entries, or a prefix of one; None for patterns."""

    @property
    def says_nothing(self) -> bool:
        """Whether it has no entry for any parameters."""
        return not self.by_pattern and self.tree_of is None

    def of(self, params: Any) -> list[list[Any]]:
        """The entries of each leaf of `params`: of all patterns that match it, or of the tree."""
        leaves = jax.tree.leaves(params)
        if not leaves:  # of a placeholder, too, which a function of the parameters does not know
            return []
        if self.tree_of is not None:
            tree = self.tree_of(params)
            entries = paths.broadcast_prefix(self.argument, tree, params, self.is_entry)
            return [[entry] for entry in entries]
        if self.says_nothing:
            return [[] for _ in leaves]
        named = paths.named_leaves(params)
        patterns, entries = zip(*self.by_pattern, strict=True)
        try:
            chosen = [matching(pattern).select(named) for pattern in patterns]
        except ValueError as error:
            raise ValueError(f"{self.argument}: {error}") from None
        return [
            list(itertools.compress(entries, flags))
            for (_, leaf), *flags in zip(named, *chosen, strict=True)
            if not paths.is_hidden(leaf)
        ]

    def texts(self, params: Any) -> list[str | None]:
        """The entry of each leaf that is a text; the last of several counts."""
        last = [entries[-1] if entries else None for entries in self.of(params)]
        return [entry if isinstance(entry, str) else None for entry in last]


class _Tree(NamedTuple):
    """A tree in two parts that have a hash."""

    entries: tuple[Any, ...]
    structure: Any

    def __call__(self, params: Any) -> Any:
        return self.structure.unflatten(self.entries)


def entries_of(argument: str, where: Any, is_entry: IsEntry) -> Entries:
    """What an argument says by patterns, a tree, or a function of the parameters that returns one.

    None says nothing.
    """
    if where is None or are_patterns(where, is_entry):
        return Entries(argument, is_entry, tuple((where or {}).items()))
    if paths.is_function(where):
        return Entries(argument, is_entry, tree_of=where)
    entries, structure = jax.tree.flatten(where, is_leaf=is_entry)
    return Entries(argument, is_entry, tree_of=_Tree(tuple(entries), structure))


def are_patterns(where: Any, is_entry: IsEntry) -> TypeGuard[dict[str, Any]]:
    """Whether an argument maps patterns to entries; a tree of entries may look the same."""
    return isinstance(where, dict) and all(
        isinstance(key, str) and is_entry(entry) for key, entry in where.items()
    )


def patterns_of(names: Sequence[str], chosen: Collection[int]) -> list[str]:
    """Patterns for `matching` that are found in the names that are chosen, and in no others.

    A pattern is the end of a name, as short as it can be, with any number in the place of each
    number. So one pattern stands for the kernels of all layers: `attention/out/kernel$`.

    Args:
        names: of all parameters.
        chosen: the places of those that are meant.
    """
    others = "\n".join(name for number, name in enumerate(names) if number not in chosen)
    ends: list[str] = []
    for number in sorted(chosen):
        if not any(re.search(end, names[number]) for end in ends):
            ends.append(_end(names[number], others))
    return _joined(ends)


def _end(name: str, others: str) -> str:
    """The shortest end of a name that none of the others has, or all of it."""
    keys = [re.sub(r"\d+", r"\\d+", re.escape(key)) for key in name.split("/")]
    for start in reversed(range(len(keys))):
        end = f"(^|/){'/'.join(keys[start:])}$"
        if not re.search(end, others, re.MULTILINE):
            return end
    return f"^{re.escape(name)}$"


def _joined(ends: list[str]) -> list[str]:
    """The same patterns, with those that differ in one key only joined: `(key|query)/kernel$`."""
    by_rest: dict[str, list[str]] = {}
    for end in ends:
        key, slash, rest = end.removeprefix("(^|/)").removesuffix("$").partition("/")
        by_rest.setdefault(slash + rest if end.startswith("(") else end, []).append(key)
    return [
        rest if rest.startswith("^") else f"(^|/){_one_of(keys)}{rest}$"
        for rest, keys in by_rest.items()
    ]


def _one_of(keys: list[str]) -> str:
    return keys[0] if len(keys) == 1 else f"({'|'.join(keys)})"
