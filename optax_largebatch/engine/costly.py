"""Stores results of a leaf program where memory is cheaper than computing them again."""

from typing import Any

from optax_largebatch.engine.contract.elementwise import Looks, is_costly, looked_through
from optax_largebatch.engine.tracing import Trace


def store_what_is_costly(trace: Trace) -> None:
    """Materializes results that are not elementwise, if several passes would compute them.

    It stores the results of such equations, or the arrays of the round that they lead to (such as
    the last of many products of matrices): whichever are smaller.
    """
    for position in range(len(trace.rounds)):
        costly = _computed_twice(trace, position)
        while costly:
            results = [x for own in costly for x in own.outvars]
            arrays = [x for x in trace.handed_in[position] if _lead_to(costly, x, trace)]
            if arrays and _size(arrays) < _size(results):
                trace.store(position, *arrays)
            else:
                trace.store(position, *results)
            before, costly = costly, _computed_twice(trace, position)
            if len(costly) == len(before):
                break


def _computed_twice(trace: Trace, position: int) -> list[Any]:
    """The costly equations of a pass that a later pass repeats."""
    later = {id(x) for k in range(position + 1, len(trace.stored)) for x in trace.of_pass(k)}
    both = [x for x in trace.of_pass(position) if id(x) in later]
    looked = looked_through(both, Looks.of_trace(trace))
    return [own for own, _ in looked if is_costly(own)]


def _lead_to(equations: list[Any], target: Any, trace: Trace) -> bool:
    """Whether a variable is computed from what equations give."""
    sources = {id(x) for x in equations}
    known = [*trace.all_stored, *trace.all_worked_on]
    return any(id(x) in sources for x in trace.needed([target], known))


def _size(some: list[Any]) -> int:
    return sum(x.aval.size for x in dict.fromkeys(some))
