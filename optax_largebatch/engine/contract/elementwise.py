"""Tells elementwise equations of a leaf program from others."""

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from optax_largebatch.engine.tracing import Trace

MIXING = frozenset(
    (
        *(
            "all_gather",
            "all_to_all",
            "approx_top_k",
            "argmax",
            "argmin",
            "cholesky",
            "cumlogsumexp",
        ),
        *("conv_general_dilated", "cummax", "cummin", "cumprod", "cumsum", "custom_call"),
        *("custom_partitioning", "dot_general", "dynamic_update_slice", "eig", "eigh", "ffi_call"),
        *("fft", "gather", "householder_product", "io_callback", "lu", "pallas_call", "ppermute"),
        *("psum", "pure_callback", "qr", "ragged_dot", "reduce_scatter", "reduce_window", "rev"),
        *("scan", "scatter", "scatter-add", "scatter_add", "scatter_mul", "schur", "shard_map"),
        *("sort", "svd", "transpose", "triangular_solve", "tridiagonal_solve", "while"),
    )
)
"""The primitives that look at several elements, but may return as many as they get.

Other primitives are told by their shapes: one that returns an element for each element counts as
elementwise. So a future primitive of JAX is no error.
"""

LAYOUT = frozenset(
    (
        *("concatenate", "dynamic_slice", "expand_dims", "pad", "reshape", "rev", "slice"),
        *("split", "squeeze", "transpose"),
    )
)
"""The primitives that move elements and compute nothing."""


class Looks(dict):
    """The kinds of data on which variables depend: a "leaf", "numbers", or "places".

    A number may be spread over a leaf. What has places is anything else with several elements, such
    as an array of the leaf's shape that the program has made up.
    """

    @classmethod
    def of_trace(cls, trace: Trace) -> "Looks":
        """What is known of the inputs and answers of a leaf program."""
        numbers = [*trace.of_blocks, *trace.all_answers]
        elements = [*trace.like_leaf, *trace.all_worked_on]
        return cls(dict.fromkeys(numbers, "numbers") | dict.fromkeys(elements, "leaf"))

    def of(self, atom: Any) -> str:
        """What an operand depends on; anything with one element is a number."""
        if isinstance(atom, Literal):
            return "numbers"
        kind = self.get(atom, "places")
        return "numbers" if kind == "places" and atom.aval.size == 1 else kind


def looked_through(equations: Sequence[Any], looks: Looks) -> Iterator[tuple[Any, Any]]:
    """The equations that work on a leaf, but not element by element.

    Args:
        equations: equations in order.
        looks: what their inputs are; what they compute is added.

    Returns:
        Pairs of an equation and the one to blame, which is inside it or is itself.
    """
    for equation in equations:
        kinds = {looks.of(x) for x in equation.invars}
        mixes = equation.primitive.name in MIXING
        inner = [] if mixes else _programs_in(equation)
        if inner:
            told = _look_inside(equation, inner, looks)
            if told is not None:
                yield equation, told
        elif "leaf" in kinds:
            looks.update(dict.fromkeys(equation.outvars, "leaf"))
            shapes = {x.aval.shape for x in equation.invars if looks.of(x) == "leaf"}
            changed = any(x.aval.shape not in shapes for x in equation.outvars)
            if mixes or changed or "places" in kinds:
                yield equation, equation
        else:
            spread = equation.primitive.name == "broadcast_in_dim"
            alike = {x.aval.shape for x in equation.invars}
            kept = all(x.aval.shape in alike for x in equation.outvars)
            numbers = "places" not in kinds and (spread or (kept and not mixes))
            looks.update(dict.fromkeys(equation.outvars, "numbers" if numbers else "places"))


def _look_inside(equation: Any, programs: Sequence[ClosedJaxpr], looks: Looks) -> Any:
    """The equation to blame in a call, if there is one; `looks` learns of what it returns."""
    blamed = []
    returned = []
    for inner in programs:
        own = Looks(dict.fromkeys(inner.jaxpr.constvars, "places"))
        arguments = equation.invars[len(equation.invars) - len(inner.jaxpr.invars) :]
        own.update(zip(inner.jaxpr.invars, map(looks.of, arguments), strict=True))
        blamed += [culprit for _, culprit in looked_through(inner.jaxpr.eqns, own)]
        returned.append([own.of(x) for x in inner.jaxpr.outvars])
    for variable, *kinds in zip(equation.outvars, *returned, strict=True):
        looks[variable] = next((x for x in ("leaf", "places") if x in kinds), "numbers")
    return blamed[0] if blamed else None


def _programs_in(equation: Any) -> list[ClosedJaxpr]:
    """The programs that an equation may run: those of a call, or the branches of a choice."""
    programs = []
    for value in equation.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            if isinstance(inner, ClosedJaxpr):
                programs.append(inner)
            elif isinstance(inner, Jaxpr):  # the same class since jax 0.12
                programs.append(ClosedJaxpr(inner, []))
    return programs


def check_single_elements(trace: Trace, otherwise: str) -> None:
    """Checks that a leaf program works on single elements, as it says.

    Args:
        trace: the program.
        otherwise: the name for the message where its equations have none.

    Raises:
        ValueError: the program does not work on single elements.
    """
    run = {id(x) for position in range(len(trace.stored)) for x in trace.of_pass(position)}
    equations = [x for x in trace.jaxpr.eqns if id(x) in run]
    for equation, culprit in looked_through(equations, Looks.of_trace(trace)):
        named = [x for x in str(equation.source_info.name_stack).split("/") if x]
        raise ValueError(
            f"{named[-1] if named else otherwise}: the leaf program says given='parts', and "
            f"`{culprit.primitive.name}` does not look at each element of the leaf for itself. "
            "Ask for sums, means and norms by `yield block_sums(...)` and its like, or say "
            "given='whole'."
        )


def is_costly(equation: Any) -> bool:
    """Whether an equation that is not elementwise computes anything."""
    return equation.primitive.name not in LAYOUT
