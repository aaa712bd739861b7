"""The stages of a batch plan: from which example on which batch size is used."""

from collections.abc import Iterable, Mapping, Sequence
import itertools
from typing import Any, NamedTuple

from optax_largebatch.plans.counts import count

Start = tuple[int, int]
"""`(seen, batch_size)`: the batch size from so many examples (or tokens) on."""


class Stage(NamedTuple):
    """Steps that have one batch size."""

    first_step: int
    """The step that it begins with; the run begins with step 0."""
    first_example: int
    """The examples that were seen before that step."""
    batch_size: int
    """The examples in each of its steps."""


def starts_of(stages: Any) -> list[Start]:
    """The starts that an argument `stages` means, checked."""
    starts = []
    for number, (seen, batch_size) in enumerate(_pairs(stages)):
        where = f"stages[{number}]"
        start = count(f"{where}, the start,", seen)
        starts.append((start, count(f"{where}, the batch size,", batch_size, at_least=1)))
    if not starts or starts[0][0] != 0:
        raise ValueError(
            f"stages must begin with a batch size for 0, as in '0:512 2M:2048'; got {stages!r}."
        )
    for (before, _), (after, _) in itertools.pairwise(starts):
        if after <= before:
            raise ValueError(
                f"stages must be in the order in which they come, each later than the one before; "
                f"got {after} after {before}."
            )
    return starts


def _pairs(stages: Any) -> Iterable[Any]:
    """Pairs of a start and a batch size, from each form in which stages may be given."""
    if isinstance(stages, str):
        parts = [part.split(":") for part in stages.replace(",", " ").split()]
        if len(parts) == 1 and len(parts[0]) == 1:  # one batch size for the whole run
            return [(0, stages)]
        if any(len(part) != 2 for part in parts):
            raise ValueError(
                f"stages must be 'seen:batch_size', with spaces between the stages, as in "
                f"'0:512 2M:2048'; got {stages!r}."
            )
        return parts
    if isinstance(stages, Mapping):
        return stages.items()
    if isinstance(stages, Sequence) and all(
        isinstance(pair, Sequence) and len(pair) == 2 and not isinstance(pair, str)
        for pair in stages
    ):
        return stages
    if hasattr(stages, "__index__"):  # one batch size for the whole run
        return [(0, stages)]
    raise TypeError(
        "stages must be a string such as '0:512 2M:2048', a dict or a list of pairs of (seen, "
        f"batch_size), a batch size, or a growth such as seesaw(...); got {stages!r}."
    )


def stages_of(
    starts: Sequence[Start],
    examples: int,
) -> tuple[tuple[Stage, ...], int]:
    """The stages of a run of so many examples, and the number of its steps.

    A stage begins with the first step before which its start has been seen. A start that lies
    inside a batch has to wait for that batch, and a stage that is shorter than a batch of the stage
    before may have no step at all.
    """
    stages = []
    step = seen = 0
    ends = [seen for seen, _ in starts[1:]] + [examples]
    for (_, batch_size), end in zip(starts, ends, strict=True):
        steps = max(0, -(-(end - seen) // batch_size))
        if steps:
            stages.append(Stage(step, seen, batch_size))
        step += steps
        seen += steps * batch_size
    return tuple(stages), step
