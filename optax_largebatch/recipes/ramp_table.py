"""The published ramps of the batch size as a table."""

import dataclasses
from typing import NamedTuple

from optax_largebatch.plans.counts import Count, count, written
from optax_largebatch.plans.stages import starts_of
from optax_largebatch.recipes.published import Entry, published_ramps


class RampLine(NamedTuple):
    """A ramp in the table. What `ramp` must be given stands in square brackets."""

    name: str
    batch_sizes: str
    """The sequences in a step."""
    until: str
    """Where the last batch size begins."""
    total: str
    """The length of the run."""
    counted_in: str
    """What `until` and `total` count."""
    rate: str
    """How the learning rate followed the batch size."""
    sequence_length: int
    source: str


@dataclasses.dataclass(frozen=True)
class Ramps:
    """The result of `ramps`: print it, or read its `names` and `lines`."""

    lines: tuple[RampLine, ...]
    """A line for each ramp."""

    @property
    def names(self) -> list[str]:
        """The names, for `ramp`."""
        return [line.name for line in self.lines]

    def __str__(self) -> str:
        head = ("ramp", "batch sizes", "until", "of", "counted in", "rate")
        rows = [head, *(line[: len(head)] for line in self.lines)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def ramps() -> Ramps:
    """A table of the ramps of the batch size: warm-ups of published runs.

    Returns:
        The ramps, to be printed.

    Examples:
        >>> from optax_largebatch import recipes
        >>> print(recipes.ramps().names[:3])
        ['bloom-176b', 'deepseek-v2', 'deepseek-v3']
    """
    return Ramps(tuple(_line(name, entry) for name, entry in sorted(published_ramps().items())))


def _line(name: str, entry: Entry) -> RampLine:
    sizes, until = _linear(entry["linear"]) if "linear" in entry else _listed(entry["stages"])
    return RampLine(
        name,
        sizes,
        written(count("until", until)),
        written(count("total", entry["total"])) if "total" in entry else "[total]",
        entry["counted_in"],
        entry["coupling"],
        entry["sequence_length"],
        entry["source"],
    )


def _linear(linear: Entry) -> tuple[str, Count]:
    """The batch sizes of a linear ramp, and its length."""
    increment = linear.get("increment", "[increment]")
    return f"{linear['first']} to {linear['last']} by {increment}", linear["length"]


def _listed(stages: str) -> tuple[str, Count]:
    """The batch sizes of listed stages, and the start of the last one."""
    starts = starts_of(stages)
    sizes = [str(batch) for _, batch in starts]
    if len(sizes) > 4:
        return f"{len(sizes)} from {sizes[0]} to {sizes[-1]}", starts[-1][0]
    return ", ".join(sizes), starts[-1][0]
