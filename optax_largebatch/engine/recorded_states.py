"""A record of the transforms in an optimizer, for readers who need what a state does not say.

Wrappers, of this library or of others, hide in closures what an optimizer is made of. But each
transform in it makes its own state, in its own `init`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import contextvars
from typing import Any, NamedTuple

import jax

Facts = Mapping[str, Any]
"""What a transform does with one parameter; what does not apply is left out.

- `direction`: where its steps go: "adam", "muon", "momentum";
- `length`: what makes them as long as they are: "trust ratio", "sphere", "size";
- `bounds`: the bounds on a trust ratio;
- `matrices`: the rows and columns of each of its matrices;
- `decay`, `rate`: its weight decay and learning rate, numbers or schedules.
"""

FactsOf = Callable[[Any], Sequence[Facts]]
"""From the parameters to the facts of each."""


def of_all(facts: Facts) -> FactsOf:
    """The same facts for all parameters."""
    return lambda params: [facts] * len(jax.tree.leaves(params))


class RecordedState(NamedTuple):
    """A state that a transform has made."""

    state: Any
    transform: Any
    """The `LeafTransform`."""
    params: Any
    """The parameters that the transform was given."""


_RECORD: contextvars.ContextVar[list[RecordedState] | None] = contextvars.ContextVar(
    "record", default=None
)


@contextlib.contextmanager
def recorded_states() -> Iterator[list[RecordedState]]:
    """A list of all states that are made inside the `with` statement."""
    record: list[RecordedState] = []
    token = _RECORD.set(record)
    try:
        yield record
    finally:
        _RECORD.reset(token)


def record_state(state: Any, transform: Any, params: Any) -> None:
    """Puts a state on record, inside `recorded_states`."""
    record = _RECORD.get()
    if record is not None:
        record.append(RecordedState(state, transform, params))
