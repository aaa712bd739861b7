"""A record of the states that transforms make, for readers who need what a state does not say.

Wrappers, of this library or of others, hide in closures what an optimizer is made of. But each
transform in it makes its own state, in its own `init`.
"""

from collections.abc import Iterator
import contextlib
import contextvars
from typing import Any, NamedTuple


class RecordedState(NamedTuple):
    """A state that a transform has made."""

    state: Any
    declaration: Any
    """The state's NamedTuple, with a `Field` in the place of each of its arrays."""
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


def record_state(state: Any, declaration: Any, params: Any) -> None:
    """Puts a state on record, inside `recorded_states`."""
    record = _RECORD.get()
    if record is not None:
        record.append(RecordedState(state, declaration, params))
