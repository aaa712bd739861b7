"""A call of a function of this library: it can be run, and printed as code."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import optax

from optax_largebatch.optimizers.lamb import lamb
from optax_largebatch.optimizers.lans import lans
from optax_largebatch.optimizers.lars import larc, lars
from optax_largebatch.params.groups import param_groups
from optax_largebatch.params.kinds import excluding_kinds, matching_kinds
from optax_largebatch.schedules.cosine import warmup_cosine
from optax_largebatch.schedules.drops import warmup_drops
from optax_largebatch.schedules.inverse_sqrt import warmup_inverse_sqrt
from optax_largebatch.schedules.warmup import warmup_hold_decay, warmup_polynomial
from optax_largebatch.transforms.chain import chain
from optax_largebatch.transforms.decay import add_decayed_weights
from optax_largebatch.transforms.learning_rate import scale_by_learning_rate
from optax_largebatch.transforms.momentum import accumulate_momentum

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    f"lb.{function.__name__}": function
    for function in (
        accumulate_momentum,
        add_decayed_weights,
        chain,
        excluding_kinds,
        lamb,
        lans,
        larc,
        lars,
        matching_kinds,
        param_groups,
        scale_by_learning_rate,
        warmup_cosine,
        warmup_drops,
        warmup_hold_decay,
        warmup_inverse_sqrt,
        warmup_polynomial,
    )
} | {
    "optax.constant_schedule": optax.constant_schedule,
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


def _value(argument: Any) -> Any:
    if isinstance(argument, Variable):
        return argument.call()
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
    if isinstance(argument, str):
        return f'"{argument}"'
    return argument.code(indent) if isinstance(argument, Call) else repr(argument)
