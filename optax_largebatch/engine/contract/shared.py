"""Fields of a state, and numbers for `each_matrix`, that are the same for all leaves."""

from collections.abc import Iterator, Mapping, Sequence
import re
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from optax_largebatch.engine.tracing import Trace, variables


def check_shared(traces: Sequence[Trace]) -> None:
    """Checks that what is to be the same for all leaves is.

    That are the new values of shared fields, and the numbers that `each_matrix` is given.

    Args:
        traces: the programs of the leaves.

    Raises:
        ValueError: a value depends on the arrays of a leaf, or is computed in several ways.
    """
    ways: dict[Any, str] = {}
    for trace in traces:
        columns = zip(trace.rounds, trace.answers, strict=True)
        of_all = [x for one, own in columns if one.of_all_leaves for x in own]
        same = {*variables(trace.same_inputs)}
        inputs = {*trace.jaxpr.invars, *trace.all_answers, *trace.all_worked_on}
        inputs -= {*of_all, *same}
        for key, targets, error in _same_for_all(trace):
            equations = trace.needed(targets, [*of_all, *trace.all_worked_on])
            used = {*variables(targets), *(x for own in equations for x in variables(own.invars))}
            way = _written(equations, targets)
            # Numbers of other types, or of leaves that are split otherwise, look different.
            types = (*(x.aval.dtype for x in targets), *map(_specs, trace.like_leaf))
            if used & inputs or ways.setdefault((key, types), way) != way:
                raise ValueError(error)


def _same_for_all(trace: Trace) -> Iterator[tuple[Any, list[Any], str]]:
    """What is to be the same for all leaves: its key, its variables, and the error if not."""
    for who, name, value in trace.same_for_all:
        error = (
            f"{who}: the state's field {name!r} is Shared, and its new value differs from leaf to "
            "leaf. Compute it of the step's scalars and of `yield global_norm(...)`, or declare "
            "it as PerParameter(), NumberPerBlock(stacked) or VectorOfBlocks(stacked)."
        )
        yield (who, name), jax.tree.leaves(value), error
    dtypes = tuple(x.aval.dtype for x in trace.like_leaf)
    for one, given in zip(trace.rounds, trace.handed_in, strict=True):
        if one.on_matrices:
            error = (
                "each_matrix: its numbers differ from leaf to leaf, and matrices of one function "
                "are worked on together. Compute the numbers of the step's scalars and of `yield "
                "global_norm(...)`, or give those leaves a function of their own."
            )
            yield (one.on_matrices.function, dtypes), given[1:], error


def _specs(x: Any) -> str:
    """The way in which an array is split, by its type."""
    sharding = x.aval.sharding
    return "" if sharding.mesh.empty else str(sharding.spec)


def _written(equations: Sequence[Any], targets: Sequence[Any], inputs: Sequence[Any] = ()) -> str:
    """Equations with numbers for the names of their variables, in the order of their use."""
    numbers: dict[Any, int] = {}

    def name(x: Any) -> str:
        return repr(x.val) if isinstance(x, Literal) else f"x{numbers.setdefault(x, len(numbers))}"

    head = str([*map(name, inputs)])
    lines = [
        f"{[*map(name, own.outvars)]} = {own.primitive.name}[{_parameter(own.params)}] "
        f"{[*map(name, own.invars)]}"
        for own in equations
    ]
    return "\n".join([head, *lines, str([*map(name, targets)])])


def _parameter(value: Any) -> str:
    """A parameter of an equation; a program in it is written equation by equation.

    JAX would print a part of it once or several times, depending on what is left in its caches.
    """
    if isinstance(value, ClosedJaxpr | Jaxpr):  # one class since jax 0.12
        own = getattr(value, "jaxpr", value)
        written = _written(own.eqns, own.outvars, [*own.constvars, *own.invars])
        return f"{written} {getattr(value, 'consts', ())}"
    if isinstance(value, Mapping):
        return str({key: _parameter(own) for key, own in value.items()})
    if isinstance(value, tuple | list):
        return str([*map(_parameter, value)])
    return re.sub(r"0x[0-9a-f]+", "", repr(value))  # where functions lie in memory says nothing
