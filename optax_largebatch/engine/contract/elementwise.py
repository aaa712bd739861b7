"""Which equations look at each element of a leaf for itself, and which do not."""

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Literal

from optax_largebatch.engine.tracing import Trace

ELEMENTWISE = frozenset(
    (
        *("abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2"),
        *("atanh", "bitcast_convert_type", "broadcast_in_dim", "cbrt", "ceil", "clamp", "complex"),
        *("conj", "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq"),
        *("erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "imag"),
        *("integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max"),
        *("min", "mul", "ne", "neg", "nextafter", "not", "optimization_barrier", "or"),
        *("pbroadcast", "population_count", "pow", "pvary", "real", "reduce_precision", "rem"),
        *("round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic"),
        *("shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub"),
        *("tan", "tanh", "xor"),
    )
)
"""The primitives of JAX that look at each element for itself."""

CALLS = frozenset(
    (
        *("checkpoint", "closed_call", "cond", "core_call", "custom_jvp_call"),
        *("custom_vjp_call", "jit", "pjit", "remat"),
    )
)
"""Those that run other programs, which are looked at in their turn."""

LAYOUT = frozenset(
    (
        *("concatenate", "dynamic_slice", "expand_dims", "pad", "reshape", "rev", "slice"),
        *("split", "squeeze", "transpose"),
    )
)
"""Those that move elements and compute nothing."""


class Looks(dict):
    """What variables depend on: the elements of a "leaf", "numbers", or "places" of elements.

    A number may be spread over a leaf. What has places is anything else with several elements, such
    as an array of the leaf's shape that the program has made up.
    """

    @classmethod
    def of_trace(cls, trace: Trace) -> "Looks":
        """What is known of the inputs and answers of a leaf program."""
        numbers = [*trace.of_blocks, *trace.all_answers]
        return cls(dict.fromkeys(numbers, "numbers") | dict.fromkeys(trace.like_leaf, "leaf"))

    def of(self, atom: Any) -> str:
        """What an operand depends on; anything with one element is a number."""
        if isinstance(atom, Literal):
            return "numbers"
        kind = self.get(atom, "places")
        return "numbers" if kind == "places" and atom.aval.size == 1 else kind


def looked_through(equations: Sequence[Any], looks: Looks) -> Iterator[tuple[Any, Any]]:
    """The equations that work on a leaf, but not on each of its elements for itself.

    Args:
        equations: equations in order.
        looks: what their inputs are; what they compute is added.

    Returns:
        Pairs of the equation and the one that is to blame, inside it or itself.
    """
    for equation in equations:
        kinds = {looks.of(x) for x in equation.invars}
        name = equation.primitive.name
        if name in CALLS:
            told = _look_inside(equation, looks)
            if told:
                yield equation, told
        elif "leaf" in kinds:
            looks.update(dict.fromkeys(equation.outvars, "leaf"))
            if name not in ELEMENTWISE or "places" in kinds:
                yield equation, equation
        else:
            spread = name in ELEMENTWISE and "places" not in kinds
            looks.update(dict.fromkeys(equation.outvars, "numbers" if spread else "places"))


def _look_inside(equation: Any, looks: Looks) -> Any:
    """The equation to blame in a call, if there is one; `looks` learns of what it returns."""
    blamed = []
    returned = []
    for inner in _programs_in(equation):
        own = Looks(dict.fromkeys(inner.jaxpr.constvars, "places"))
        arguments = equation.invars[len(equation.invars) - len(inner.jaxpr.invars) :]
        own.update(zip(inner.jaxpr.invars, map(looks.of, arguments), strict=True))
        blamed += [culprit for _, culprit in looked_through(inner.jaxpr.eqns, own)]
        returned.append([own.of(x) for x in inner.jaxpr.outvars])
    for variable, *kinds in zip(equation.outvars, *returned, strict=True):
        looks[variable] = next((x for x in ("leaf", "places") if x in kinds), "numbers")
    return blamed[0] if blamed else None


def _programs_in(equation: Any) -> list[ClosedJaxpr]:
    """The programs that a call may run."""
    params = equation.params
    if "branches" in params:
        return list(params["branches"])
    inner = next(params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params)
    return [inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, [])]


def check_single_elements(trace: Trace, otherwise: str) -> None:
    """Checks that a leaf program works on single elements, as it says.

    Args:
        trace: the program.
        otherwise: the name for the message where its equations have none.

    Raises:
        ValueError: it does not.
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
