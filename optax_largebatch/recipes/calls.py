"""A call of a function of this library: it can be run, and printed as code."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import optax

from optax_largebatch.optimizers.lamb import lamb
from optax_largebatch.optimizers.lans import lans
from optax_largebatch.optimizers.lars import larc, lars
from optax_largebatch.optimizers.muon import muon
from optax_largebatch.optimizers.muonh import muonh
from optax_largebatch.params.groups import param_groups
from optax_largebatch.params.kinds import matching_kinds
from optax_largebatch.params.rules import at_least_ndim, matching
from optax_largebatch.schedules.warmup import warmup_decay, warmup_drops, warmup_inverse_sqrt
from optax_largebatch.transforms.adam import scale_by_adam
from optax_largebatch.transforms.chain import chain
from optax_largebatch.transforms.clipping import clip_by_global_norm
from optax_largebatch.transforms.decay import add_decayed_weights
from optax_largebatch.transforms.learning_rate import scale_by_learning_rate
from optax_largebatch.transforms.momentum import accumulate_momentum

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    f"lb.{function.__name__}": function
    for function in (
        accumulate_momentum,
        add_decayed_weights,
        at_least_ndim,
        chain,
        clip_by_global_norm,
        lamb,
        lans,
        larc,
        lars,
        matching,
        matching_kinds,
        muon,
        muonh,
        param_groups,
        scale_by_adam,
        scale_by_learning_rate,
        warmup_decay,
        warmup_drops,
        warmup_inverse_sqrt,
    )
} | {
    "~lb.matching": lambda *patterns: ~matching(*patterns),
    "~lb.matching_kinds": lambda *kinds: ~matching_kinds(*kinds),
    "optax.warmup_exponential_decay_schedule": optax.warmup_exponential_decay_schedule,
}
_WIDTH = 88


@dataclasses.dataclass(frozen=True)
class Call:
    """A function with its arguments, which may be calls themselves."""

    function: str
    arguments: tuple[Any, ...] = ()
    named: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __call__(self) -> Any:
        """Runs the call."""
        named = {name: _value(argument) for name, argument in self.named.items()}
        return _FUNCTIONS[self.function](*map(_value, self.arguments), **named)

    def code(self, indent: int = 0) -> str:
        """The call in Python."""
        parts = [(None, argument) for argument in self.arguments] + list(self.named.items())
        one_line = ", ".join(_argument(name, argument, indent) for name, argument in parts)
        if "\n" not in one_line and indent + len(self.function) + len(one_line) <= _WIDTH:
            return f"{self.function}({one_line})"
        inner = indent + 4
        lines = [f"{' ' * inner}{_argument(name, one, inner)},\n" for name, one in parts]
        return f"{self.function}(\n{''.join(lines)}{' ' * indent})"


@dataclasses.dataclass(frozen=True)
class Variable:
    """A name for the result of a call."""

    name: str
    call: Call


@dataclasses.dataclass(frozen=True)
class Method(Call):
    """A call of a method of a variable."""

    of: Variable | None = None

    def __call__(self) -> Any:
        """Runs the call."""
        assert self.of is not None
        method = getattr(self.of.call(), self.function.split(".")[1])
        return method(*map(_value, self.arguments))


def method(of: Variable, name: str, *arguments: Any) -> Method:
    """The call of a method of a variable."""
    return Method(f"{of.name}.{name}", arguments, of=of)


def _value(argument: Any) -> Any:
    if isinstance(argument, Variable):
        return argument.call()
    if isinstance(argument, list):
        return [_value(one) for one in argument]
    if isinstance(argument, Mapping):
        return {key: _value(one) for key, one in argument.items()}
    return argument() if isinstance(argument, Call) else argument


def _argument(name: str | None, argument: Any, indent: int) -> str:
    text = _code(argument, indent)
    return text if name is None else f"{name}={text}"


def _code(argument: Any, indent: int) -> str:
    if isinstance(argument, Variable):
        return argument.name
    if isinstance(argument, Mapping):
        return "{" + ", ".join(f'"{k}": {_code(v, indent)}' for k, v in argument.items()) + "}"
    if isinstance(argument, list | tuple):
        return _code_of_several(argument, indent)
    if isinstance(argument, str):
        return f'"{argument}"'
    return argument.code(indent) if isinstance(argument, Call) else repr(argument)


def _code_of_several(arguments: list[Any] | tuple[Any, ...], indent: int) -> str:
    opening, closing = "[]" if isinstance(arguments, list) else "()"
    one_line = ", ".join(_code(one, indent) for one in arguments)
    if "\n" not in one_line and indent + len(one_line) <= _WIDTH:
        comma = "," if len(arguments) == 1 and opening == "(" else ""
        return f"{opening}{one_line}{comma}{closing}"
    inner = indent + 4
    lines = [f"{' ' * inner}{_code(one, inner)},\n" for one in arguments]
    return f"{opening}\n{''.join(lines)}{' ' * indent}{closing}"
