"""A call of a public function of this library: it can be run, and printed as code."""

from collections.abc import Mapping
import importlib
from typing import Any

_MODULES = {"lb": "optax_largebatch", "optax": "optax"}
"""Imported when a call runs: the first one imports this module."""

_WIDTH = 89


class Call:
    """A function with its arguments, which may be calls themselves.

    Args:
        function: its name, as in `"lb.lamb"`; or, with `owner`, that of a method.
        *arguments: its positional arguments.
        variable: the name that its result has in a program, or None.
        owner: the call whose result has the method.
        **named: its other arguments; those that are None are left out.
    """

    def __init__(
        self,
        function: str,
        /,
        *arguments: Any,
        variable: str | None = None,
        owner: "Call | None" = None,
        **named: Any,
    ) -> None:
        self.function = function
        self.arguments = arguments
        self.named = given(**named)
        self.variable = variable
        self.owner = owner

    def __call__(self) -> Any:
        """Runs the call."""
        module, _, name = self.function.removeprefix("~").rpartition(".")
        owner = importlib.import_module(_MODULES[module]) if self.owner is None else self.owner()
        result = getattr(owner, name)(*map(made, self.arguments), **made(self.named))
        return ~result if self.function.startswith("~") else result

    def code(self, indent: int = 0) -> str:
        """The call in Python."""
        items = [("", argument) for argument in self.arguments]
        items += [(f"{name}=", argument) for name, argument in self.named.items()]
        owner = "" if self.owner is None else f"{self.owner.variable}."
        return _in_brackets(f"{owner}{self.function}(", items, ")", indent)

    def variables(self) -> dict[str, "Call"]:
        """The variables on which the call depends, in the order of a program."""
        variables: dict[str, Call] = {}
        for argument in (self.owner, *self.arguments, *self.named.values()):
            for value in argument.values() if isinstance(argument, Mapping) else [argument]:
                variables |= value.variables() if isinstance(value, Call) else {}
        return variables if self.variable is None else variables | {self.variable: self}


def program(optimizer: Call) -> str:
    """Python code that builds an optimizer and its variables."""
    variables = optimizer.variables() | {"optimizer": optimizer}
    lines = [f"{name} = {call.code()}" for name, call in variables.items()]
    imports = ["import optax"] if any("optax." in line for line in lines) else []
    return "\n".join([*imports, "import optax_largebatch as lb", "", *lines])


def given(**arguments: Any) -> dict[str, Any]:
    """The arguments that are not None."""
    return {name: value for name, value in arguments.items() if value is not None}


def made(value: Any) -> Any:
    """The value with the results of its calls. A mask that is a tree of another kind stays."""
    if type(value) is dict:
        return {key: made(x) for key, x in value.items()}
    return value() if isinstance(value, Call) else value


def _code(value: Any, indent: int) -> str:
    if isinstance(value, Call):
        return value.variable or value.code(indent)
    if isinstance(value, Mapping):
        return _in_brackets("{", [(f'"{key}": ', x) for key, x in value.items()], "}", indent)
    if isinstance(value, list | tuple):
        opening, closing = "[]" if isinstance(value, list) else "()"
        return _in_brackets(opening, [("", x) for x in value], closing, indent)
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _in_brackets(
    opening: str,
    items: list[tuple[str, Any]],
    closing: str,
    indent: int,
) -> str:
    """On one line if that is short enough, otherwise one line for each item.

    Args:
        opening: the bracket, with what stands before it.
        items: the values, with what is written before each.
        closing: the other bracket.
        indent: of the first line.
    """
    one_line = ", ".join(before + _code(value, indent) for before, value in items)
    if "\n" not in one_line and indent + len(opening) + len(one_line) <= _WIDTH:
        comma = "," * (opening == "(" and len(items) == 1)
        return f"{opening}{one_line}{comma}{closing}"
    inner = indent + 4
    lines = [f"{' ' * inner}{before}{_code(value, inner)},\n" for before, value in items]
    return f"{opening}\n{''.join(lines)}{' ' * indent}{closing}"
