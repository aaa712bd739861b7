"""Checks of arguments: every message names the argument, its value and what is allowed.

A value may already be a JAX array, such as the traced ones of `optax.inject_hyperparams`. It cannot
be compared with a range at trace time, so its shape is checked and its value is not.
"""

from collections.abc import Callable, Iterable, Sequence
import functools
import math
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

P = ParamSpec("P")
T = TypeVar("T")

Scalar = float | jax.Array
"""A number, or a scalar array such as `optax.inject_hyperparams` passes."""

Bounds = tuple[Any, Any] | None
"""`(low, high)`, None for an end without a bound."""

_LARGEST_OF_32_BITS = float(np.finfo(np.float32).max)
_NO_DTYPE = (jax.Array, np.ndarray, np.generic, tuple, list, dict)
"""Values that NumPy turns into a dtype, but with a warning or into a record."""


def check_number(name: str, value: Any, allowed: str) -> None:
    """Checks that `value` is a real number in the interval `allowed`, such as `"[0, 1)"`."""
    if isinstance(value, jax.Array):
        _check_scalar_array(name, value, allowed)
        return
    of_numpy = isinstance(value, np.ndarray | np.generic)
    real = _is_real(value.dtype) if of_numpy else hasattr(value, "__float__")
    if not real or isinstance(value, bool) or getattr(value, "ndim", 0):
        raise TypeError(f"{name} must be a number in {allowed}, got {_show(value)}.")
    low, high = map(float, allowed[1:-1].split(","))
    try:
        number = float(value)
    except OverflowError:  # an integer beyond every float is in no interval
        number = math.nan
    above = number >= low if allowed[0] == "[" else number > low
    below = number <= high if allowed[-1] == "]" else number < high
    if not (above and below):
        raise ValueError(f"{name} must be in {allowed}, got {value!r}.")
    if _LARGEST_OF_32_BITS < abs(number) < math.inf and jnp.result_type(float).itemsize < 8:
        raise ValueError(
            f"{name} must be at most {_LARGEST_OF_32_BITS:.3g}, got {value!r}, which is infinite "
            "in 32 bits. Give a smaller number, or enable jax_enable_x64."
        )


def check_numbers(allowed: str, **values: Any) -> None:
    """Checks that arguments, by their names, are real numbers in the interval `allowed`."""
    for name, value in values.items():
        check_number(name, value, allowed)


def known_number(name: str, value: Any, allowed: str) -> float:
    """A checked number as a float; also that in an array, whose value `check_number` leaves out."""
    check_number(name, value, allowed)
    check_number(name, float(value), allowed)
    return float(value)


def check_optional_number(name: str, value: Any) -> None:
    """Checks that `value` is None or a positive real number."""
    if value is not None:
        check_number(name, value, "(0, inf)")


def check_number_or_schedule(name: str, value: Any, allowed: str) -> None:
    """Checks that `value` is a number in `allowed` or a schedule (a function of the step)."""
    if callable(value):
        return
    try:
        check_number(name, value, allowed)
    except TypeError:
        raise TypeError(
            f"{name} must be a number in {allowed} or a schedule of the step, got {_show(value)}."
        ) from None


def number_at(
    step: jax.Array,
    name: str,
    value: Any,
    allowed: str = "[0, inf)",
) -> Any:
    """The number that `value`, a number or a schedule, gives at a step.

    A schedule has to return one real number. With an array of three, each column would silently
    take its own rate.
    """
    if not callable(value):
        return value
    number = value(step)
    check_number(f"{name}: what the schedule returns", number, allowed)
    return number


def check_decay_rates(**values: Any) -> None:
    """Checks that arguments, by their names, are decay rates in [0, 1) or schedules of them."""
    for name, value in values.items():
        check_number_or_schedule(name, value, "[0, 1)")


def decay_rate_at(step: jax.Array, name: str, value: Any) -> Any:
    """The decay rate, such as `b1`, that a number or a schedule gives at a step."""
    return number_at(step, name, value, "[0, 1)")


def check_integer(name: str, value: Any, at_least: int) -> None:
    """Checks that `value` is a Python integer of `at_least` or more."""
    if isinstance(value, bool | jax.Array | np.ndarray) or not hasattr(value, "__index__"):
        raise TypeError(
            f"{name} must be a Python integer >= {at_least}, got {_show(value)}. (It shapes the "
            f"computation; under optax.inject_hyperparams pass static_args=({name!r},).)"
        )
    if value < at_least:
        raise ValueError(f"{name} must be >= {at_least}, got {value!r}.")


def check_flags(**values: Any) -> None:
    """Checks that arguments are True or False."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {_show(value)}.")


def check_condition(name: str, value: Any) -> None:
    """Checks that `value` is True, False or a boolean scalar array."""
    known = isinstance(value, bool) or getattr(value, "dtype", None) == np.bool_
    if not known or np.ndim(value):
        raise TypeError(f"{name} must be True, False or a boolean scalar array, got {value!r}.")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Checks that `value` is one of the strings `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def check_bounds(name: str, value: Any) -> None:
    """Checks that `value` is None or a pair `(low, high)`, either end None, `0 <= low <= high`."""
    if value is None:
        return
    if not isinstance(value, tuple) or len(value) != 2:
        raise TypeError(
            f"{name} must be None or a pair (low, high), either end None, got {_show(value)}."
        )
    low, high = value
    if low is not None:
        check_number(f"{name}[0]", low, "[0, inf)")
    if high is not None:
        check_number(f"{name}[1]", high, "(0, inf]")
    known = [float(end) for end in value if end is not None and not isinstance(end, jax.Array)]
    if known != sorted(known):
        raise ValueError(f"{name} must have low <= high, got {value!r}.")


def check_dtypes(**values: Any) -> None:
    """Checks that arguments are None or floating point dtypes of at least 16 bits."""
    for name, value in values.items():
        if value is None:
            continue
        try:
            dtype = None if isinstance(value, _NO_DTYPE) else jnp.dtype(value)
        except TypeError:
            dtype = None
        if dtype is None:
            raise TypeError(f"{name} must be None or a floating dtype, got {_show(value)}.")
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(f"{name} must be None or a floating dtype, got {dtype.name!r}.")
        if dtype.itemsize < 2:
            raise ValueError(
                f"{name} must be None or a floating dtype of at least 16 bits, got {dtype.name!r}: "
                "numbers of so few bits need a scale for each block, and none is kept. Give a "
                "wider one, such as 'float32'."
            )


def check_state(who: str, kind: Any, state: Any) -> None:
    """Checks that a state given to `update` can be that of the transformation `who`.

    Args:
        who: the transformation.
        kind: the NamedTuple of its state, or a plain tuple as long as the state.
        state: what was given.

    Raises:
        TypeError: the state is something else.
    """
    if isinstance(state, tuple) and _fields(state) == _fields(kind):
        return
    raise TypeError(
        f"state must be that of {who}, which keeps {_described(kind)}; got {_described(state)}. "
        "It is the state of another optimizer or of other options, or was read from a checkpoint "
        "as dictionaries and lists. Call `init` of this optimizer, or restore into what it returns."
    )


def _fields(kind: Any) -> Any:
    """The mark that tells states apart: the names of their fields, or the number of states."""
    return getattr(kind, "_fields", None) or len(kind)


def _described(kind: Any) -> str:
    """A state in words."""
    name = (kind if isinstance(kind, type) else type(kind)).__name__
    if hasattr(kind, "_fields"):
        return f"{name}({', '.join(kind._fields)})"
    return f"a tuple of {len(kind)} states" if isinstance(kind, tuple) else f"a {name}"


def refused(
    *names: str,
    why: str,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator for keywords that optax or an original has, and the function does not.

    Args:
        *names: the keywords.
        why: why there are none, and what to do: a sentence.
    """

    def decorator(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            for name in kwargs.keys() & names:
                raise TypeError(
                    f"{function.__name__}() has no argument {name!r}, got {kwargs[name]!r}. {why}"
                )
            return function(*args, **kwargs)

        return checked

    return decorator


def renamed(
    theirs: str,
    ours: str,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """`refused` for a keyword of another library: the error gives the name here."""
    return refused(theirs, why=f"Here it is called {ours!r}.")


without_nu_dtype = refused(
    "nu_dtype",
    why="In 16 bits a second moment stops growing. mu_dtype makes the first one smaller.",
)
"""For what keeps second moments."""


def quoted(names: Iterable[str]) -> str:
    """Names in quotes, in the order of the alphabet."""
    return ", ".join(map(repr, sorted(names)))


def is_zero(value: Any) -> bool:
    """Whether `value` is known, without tracing, to be zero."""
    return isinstance(value, int | float) and value == 0


def _check_scalar_array(name: str, value: jax.Array, allowed: str) -> None:
    if value.ndim != 0:
        raise ValueError(f"{name} must be a scalar, got an array of shape {value.shape}.")
    if not _is_real(value.dtype):
        raise TypeError(f"{name} must be a number in {allowed}, got one of dtype {value.dtype}.")
    # Only decay rates: what counts is 1 - b, of which no digit may be left. A learning rate in
    # bfloat16 is less than half a percent off.
    is_short = jnp.issubdtype(value.dtype, jnp.floating) and value.dtype.itemsize < 4
    if allowed == "[0, 1)" and is_short:
        raise ValueError(
            f"{name} must be a number in {allowed} of at least 32 bits, got one of dtype "
            f"{value.dtype}, in which 0.9999 is 1. Pass a Python float, or with "
            "optax.inject_hyperparams(..., hyperparam_dtype=jnp.float32): otherwise it takes the "
            "dtype of the parameters."
        )


def _is_real(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)


def _show(value: Any) -> str:
    return f"{value!r} of type {type(value).__name__}"
