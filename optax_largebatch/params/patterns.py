"""Short patterns that select some parameters and no others, for messages with a line to paste."""

from collections.abc import Collection, Sequence
import re


def patterns_of(names: Sequence[str], chosen: Collection[int]) -> list[str]:
    """Patterns for `matching` that are found in the names that are chosen, and in no others.

    A pattern is the end of a name, as short as it can be, with any number in the place of each
    number. So one pattern stands for the kernels of all layers: `attention/out/kernel$`.

    Args:
        names: of all parameters.
        chosen: the places of those that are meant.
    """
    others = "\n".join(name for number, name in enumerate(names) if number not in chosen)
    ends: dict[str, None] = {}
    for number in sorted(chosen):
        if not any(re.search(end, names[number]) for end in ends):
            ends[_end(names[number], others)] = None
    return _joined(list(ends))


def _end(name: str, others: str) -> str:
    """The shortest end of a name that none of the others has, or all of it."""
    parts = [re.sub(r"\d+", r"\\d+", re.escape(part)) for part in name.split("/")]
    for start in range(len(parts) - 1, -1, -1):
        end = f"(^|/){'/'.join(parts[start:])}$"
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
