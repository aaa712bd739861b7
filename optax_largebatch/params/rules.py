"""Rules that select parameters by name or shape."""

from collections.abc import Callable
import dataclasses
import re
from typing import Any

import jax

from optax_largebatch.arguments import check_integer
from optax_largebatch.params.paths import is_hidden, named_leaves

_Select = Callable[[list[tuple[str, Any]]], list[bool]]


@dataclasses.dataclass(frozen=True)
class Rule:
    """A selection of parameters; combine rules with `&`, `|` and `~`.

    A rule is data, for configurations and static arguments of `jax.jit`: it can be pickled, and two
    rules are equal, and hash alike, if they select by the same strings and numbers. It is not
    callable, so `optax.inject_hyperparams` cannot take it for a schedule.
    """

    description: str = dataclasses.field(compare=False)
    select: _Select

    def mask(self, params: Any) -> Any:
        """The tree of booleans for `params`; pass `rule.mask` to `optax.masked` and the like."""
        named = named_leaves(params)
        chosen = zip(named, self.select(named), strict=True)
        visible = [choice for (_, leaf), choice in chosen if not is_hidden(leaf)]
        return jax.tree.structure(params).unflatten(visible)

    def __and__(self, other: "Rule") -> "Rule":
        return self._with("&", other, _Both)

    def __or__(self, other: "Rule") -> "Rule":
        return self._with("|", other, _Either)

    def __invert__(self) -> "Rule":
        return Rule(f"~{self}", _Not(self.select))

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self} is neither true nor false before it meets the parameters. Combine rules with "
            "&, | and ~ in place of `and`, `or` and `not`; where a rule may be None, compare: "
            "`rule is None`."
        )

    def __repr__(self) -> str:
        return self.description

    def _with(self, sign: str, other: Any, choose: Callable[[_Select, _Select], _Select]) -> "Rule":
        """The combination with another rule."""
        if not isinstance(other, Rule):
            raise TypeError(
                f"{self} {sign} ... needs a rule on its right, such as at_least_ndim(2), got "
                f"{other!r} of type {type(other).__name__}. A mask that is a function or a tree "
                "stands alone."
            )
        return Rule(f"({self} {sign} {other})", choose(self.select, other.select))


def matching(*patterns: str) -> Rule:
    r"""Selects the parameters whose name matches one of the patterns.

    A name is the path joined by `/`, as in `encoder/layer_0/dense/kernel`, and a pattern is
    searched for in it with `re.search`: anchor it (`bias$`) to be stricter, or see `named`. To
    leave parameters out, write `~matching("embed")`. The names are the same in Flax linen (boxed or
    not), Flax nnx, Equinox, Haliax and plain dictionaries.

    Args:
        *patterns: regular expressions, at least one.

    Returns:
        A rule, for any argument that takes a mask.

    Raises:
        TypeError: a pattern is not a string.
        ValueError: there is no pattern or one is no regular expression; and, when the rule meets
            the parameters, a pattern matches none of them.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import matching
        >>> params = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}}
        >>> matching("bias$").mask(params)
        {'dense': {'bias': True, 'kernel': False}}
    """
    _check_patterns("matching", patterns)
    return Rule(_said("matching", patterns), _Search(patterns))


def named(*names: str) -> Rule:
    r"""Selects the parameters that have one of the names, letter for letter.

    A parameter has a path, as in `encoder/embeddings/b`. A name is one part of the path, or several
    in a row: `named("b")` selects this parameter, and `named("encoder")` all parameters under it.
    Only whole parts count, while `matching("b")` finds the "b" of `embeddings/kernel` as well. To
    leave parameters out, write `~named("b")`.

    Args:
        *names: parts of paths such as `"b"`, or several joined by `/` as in `"layer_norm/scale"`;
            at least one.

    Returns:
        A rule, for any argument that takes a mask.

    Raises:
        TypeError: a name is not a string.
        ValueError: there is no name or an empty one; and, when the rule meets the parameters, no
            parameter has one of them.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import matching, named
        >>> params = {"embeddings": jnp.ones((5, 2)), "linear": {"b": jnp.ones(2)}}
        >>> (~named("b")).mask(params)
        {'embeddings': True, 'linear': {'b': False}}
        >>> (~matching("b")).mask(params)
        {'embeddings': False, 'linear': {'b': False}}
    """
    _check_strings("named", names)
    return Rule(_said("named", names), _Search(names, whole=True))


def at_least_ndim(ndim: int) -> Rule:
    r"""Selects the parameters that have `ndim` axes or more.

    `at_least_ndim(2)` keeps the matrices, and a bias of two axes too, as in Flax's attention. To
    leave out biases and norms, use `~matching_kinds("bias", "norm")`.

    Args:
        ndim: the least number of axes, 0 or more.

    Returns:
        A rule, for any argument that takes a mask.

    Raises:
        TypeError: `ndim` is not an integer.
        ValueError: `ndim` is negative.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import at_least_ndim
        >>> params = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}}
        >>> at_least_ndim(2).mask(params)
        {'dense': {'bias': False, 'kernel': True}}
    """
    check_integer("ndim", ndim, at_least=0)
    return Rule(f"at_least_ndim({ndim})", _AtLeastNdim(ndim))


@dataclasses.dataclass(frozen=True)
class _Search:
    """Selects the names in which one of the patterns is found."""

    patterns: tuple[str, ...]
    whole: bool = False
    """Whether they are whole names, letter for letter, in place of regular expressions."""

    def __call__(self, named: list[tuple[str, Any]]) -> list[bool]:
        names = [name for name, _ in named]
        searched = [
            re.compile(f"(^|/){re.escape(own)}(/|$)" if self.whole else own)
            for own in self.patterns
        ]
        for own, pattern in zip(self.patterns, searched, strict=True):
            # No names: optax calls `init` with a placeholder in the place of parameters.
            if names and not any(map(pattern.search, names)):
                what = "name" if self.whole else "pattern"
                raise ValueError(
                    f"the {what} {own!r} matches no parameter. The names are: {listed(names)}. "
                    f"Correct the {what}, or leave it out."
                )
        return [any(pattern.search(name) for pattern in searched) for name in names]


@dataclasses.dataclass(frozen=True)
class _AtLeastNdim:
    ndim: int

    def __call__(self, named: list[tuple[str, Any]]) -> list[bool]:
        return [getattr(leaf, "ndim", 0) >= self.ndim for _, leaf in named]


@dataclasses.dataclass(frozen=True)
class _Not:
    select: _Select

    def __call__(self, named: list[tuple[str, Any]]) -> list[bool]:
        return [not chosen for chosen in self.select(named)]


@dataclasses.dataclass(frozen=True)
class _Both:
    first: _Select
    second: _Select

    def __call__(self, named: list[tuple[str, Any]]) -> list[bool]:
        columns = zip(self.first(named), self.second(named), strict=True)
        return [a and b for a, b in columns]


@dataclasses.dataclass(frozen=True)
class _Either:
    first: _Select
    second: _Select

    def __call__(self, named: list[tuple[str, Any]]) -> list[bool]:
        columns = zip(self.first(named), self.second(named), strict=True)
        return [a or b for a, b in columns]


def _said(function: str, strings: tuple[str, ...]) -> str:
    """The call as it is written."""
    return f"{function}({', '.join(map(repr, strings))})"


def _check_strings(function: str, strings: tuple[str, ...]) -> None:
    """Checks that there are strings and none of them is empty."""
    if not strings:
        raise ValueError(f"{function}() needs at least one string, such as {function}('bias').")
    for string in strings:
        if not isinstance(string, str):
            raise TypeError(
                f"{function}() takes separate strings, as in {function}('bias', 'scale'); got "
                f"{string!r} of type {type(string).__name__}."
            )
        if not string:
            raise ValueError(f"{function}() got an empty string, which would select everything.")


def _check_patterns(function: str, patterns: tuple[str, ...]) -> None:
    """Checks that there are patterns, and each is a regular expression."""
    _check_strings(function, patterns)
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"{_said(function, patterns)}: {error.pattern!r} is not a regular expression: "
                f"{error}."
            ) from None


def listed(names: list[str], most: int = 12) -> str:
    """The first names, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
