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

    A rule is not callable, so `optax.inject_hyperparams` cannot take it for a schedule.
    """

    description: str
    select: _Select

    def mask(self, params: Any) -> Any:
        """The tree of booleans for `params`; pass `rule.mask` to `optax.masked` and the like."""
        named = named_leaves(params)
        chosen = zip(named, self.select(named), strict=True)
        visible = [choice for (_, leaf), choice in chosen if not is_hidden(leaf)]
        return jax.tree.structure(params).unflatten(visible)

    def __and__(self, other: "Rule") -> "Rule":
        return self._with("&", other, lambda a, b: a and b)

    def __or__(self, other: "Rule") -> "Rule":
        return self._with("|", other, lambda a, b: a or b)

    def __invert__(self) -> "Rule":
        return Rule(f"~{self}", lambda named: [not chosen for chosen in self.select(named)])

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self} is neither true nor false before it meets the parameters. Combine rules with "
            "&, | and ~ in place of `and`, `or` and `not`; where a rule may be None, compare: "
            "`rule is None`."
        )

    def __repr__(self) -> str:
        return self.description

    def _with(self, sign: str, other: Any, choose: Callable[[bool, bool], bool]) -> "Rule":
        """The combination with another rule."""
        if not isinstance(other, Rule):
            raise TypeError(
                f"{self} {sign} ... needs a rule on its right, such as at_least_ndim(2), got "
                f"{other!r} of type {type(other).__name__}. A mask that is a function or a tree "
                "stands alone."
            )

        def select(named: list[tuple[str, Any]]) -> list[bool]:
            return list(map(choose, self.select(named), other.select(named)))

        return Rule(f"({self} {sign} {other})", select)


def matching(*patterns: str) -> Rule:
    r"""Selects the parameters whose name matches one of the patterns.

    A name is the path joined by `/`, as in `encoder/layer_0/dense/kernel`, and a pattern is
    searched for in it with `re.search`: anchor it (`bias$`) to be stricter, or see `named`. The
    names are the same in Flax linen (boxed or not), Flax nnx, Equinox and plain dictionaries.

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
    return _searching("matching", patterns, _compile("matching", patterns))


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
        >>> from optax_largebatch import excluding, named
        >>> params = {"embeddings": jnp.ones((5, 2)), "linear": {"b": jnp.ones(2)}}
        >>> (~named("b")).mask(params)
        {'embeddings': True, 'linear': {'b': False}}
        >>> excluding("b").mask(params)
        {'embeddings': False, 'linear': {'b': False}}
    """
    _check_strings("named", names)
    whole = [re.compile(f"(^|/){re.escape(name)}(/|$)") for name in names]
    return _searching("named", names, whole)


def excluding(*patterns: str) -> Rule:
    r"""Selects the parameters whose name matches none of the patterns.

    The usual mask of weight decay and of layer-wise adaptation: `excluding("bias", "scale")`.
    Names and patterns are those of `matching`, so short patterns find more than they seem to:
    `excluding("b")` leaves out "embeddings" as well, and `~named("b")` does not.

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
        >>> from optax_largebatch import excluding
        >>> params = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}}
        >>> excluding("bias").mask(params)
        {'dense': {'bias': False, 'kernel': True}}
    """
    _compile("excluding", patterns)
    return Rule(f"excluding({', '.join(map(repr, patterns))})", (~matching(*patterns)).select)


def at_least_ndim(ndim: int) -> Rule:
    r"""Selects the parameters that have `ndim` axes or more.

    `at_least_ndim(2)` keeps the matrices and leaves out biases and normalisation scales, however a
    network names them.

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
    return Rule(
        f"at_least_ndim({ndim})",
        lambda named: [getattr(leaf, "ndim", 0) >= ndim for _, leaf in named],
    )


def _searching(function: str, given: tuple[str, ...], patterns: list[re.Pattern[str]]) -> Rule:
    """Selects the names found by one of `patterns`, which belong to the strings in `given`."""

    def select(named: list[tuple[str, Any]]) -> list[bool]:
        names = [name for name, _ in named]
        for own, pattern in zip(given, patterns, strict=True):
            # No names: optax calls `init` with a placeholder in the place of parameters.
            if names and not any(map(pattern.search, names)):
                what = "name" if function == "named" else "pattern"
                raise ValueError(
                    f"the {what} {own!r} matches no parameter. The names are: {listed(names)}. "
                    f"Correct the {what}, or leave it out."
                )
        return [any(pattern.search(name) for pattern in patterns) for name in names]

    return Rule(f"{function}({', '.join(map(repr, given))})", select)


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


def _compile(function: str, patterns: tuple[str, ...]) -> list[re.Pattern[str]]:
    _check_strings(function, patterns)
    try:
        return [re.compile(pattern) for pattern in patterns]
    except re.error as error:
        raise ValueError(
            f"{function}({', '.join(map(repr, patterns))}): {error.pattern!r} is not a regular "
            f"expression: {error}."
        ) from None


def listed(names: list[str], most: int = 12) -> str:
    """The first names, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
