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

    A rule is no callable, so that `optax.inject_hyperparams` cannot take it for a schedule.
    """

    description: str
    select: _Select

    def mask(self, params: Any) -> Any:
        """The tree of booleans for `params`; hand `rule.mask` to `optax.masked` and the like."""
        named = named_leaves(params)
        chosen = zip(named, self.select(named), strict=True)
        visible = [choice for (_, leaf), choice in chosen if not is_hidden(leaf)]
        return jax.tree.structure(params).unflatten(visible)

    def __and__(self, other: "Rule") -> "Rule":
        return _combine(f"({self} & {other})", lambda a, b: a and b, self, other)

    def __or__(self, other: "Rule") -> "Rule":
        return _combine(f"({self} | {other})", lambda a, b: a or b, self, other)

    def __invert__(self) -> "Rule":
        return Rule(f"~{self}", lambda named: [not chosen for chosen in self.select(named)])

    def __repr__(self) -> str:
        return self.description


NOTHING = Rule("nothing", lambda named: [False] * len(named))
"""Selects no parameter."""


def matching(*patterns: str) -> Rule:
    r"""Selects the parameters whose name matches one of the patterns.

    A name is the path joined by `/`, as in `encoder/layer_0/dense/kernel`, and a pattern is
    searched for in it with `re.search`: anchor it (`bias$`) to be stricter. The names are the
    same in Flax linen (boxed or not), Flax nnx, Equinox and plain dictionaries.

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
    compiled = _compile("matching", patterns)

    def select(named: list[tuple[str, Any]]) -> list[bool]:
        names = [name for name, _ in named]
        for pattern in compiled:
            # No names at all: optax initialises with a placeholder in the place of parameters.
            if names and not any(map(pattern.search, names)):
                raise ValueError(
                    f"the pattern {pattern.pattern!r} matches no parameter. The names are: "
                    f"{_listed(names)}. Correct the pattern, or leave it out."
                )
        return [any(pattern.search(name) for pattern in compiled) for name in names]

    return Rule(f"matching({', '.join(map(repr, patterns))})", select)


def excluding(*patterns: str) -> Rule:
    r"""Selects the parameters whose name matches none of the patterns.

    The usual mask of weight decay and of layer-wise adaptation: `excluding("bias", "scale")`.
    Names and patterns are those of `matching`.

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

    `at_least_ndim(2)` keeps the matrices and leaves out biases and normalisation scales, in
    whatever way a network names them.

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


def _combine(description: str, choose: Callable[[bool, bool], bool], *rules: Rule) -> Rule:
    def select(named: list[tuple[str, Any]]) -> list[bool]:
        return [choose(a, b) for a, b in zip(*(rule.select(named) for rule in rules), strict=True)]

    return Rule(description, select)


def _compile(function: str, patterns: tuple[str, ...]) -> list[re.Pattern[str]]:
    if not patterns:
        raise ValueError(f"{function}() needs at least one pattern, such as {function}('bias').")
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(
                f"{function}() takes patterns as separate strings, as in "
                f"{function}('bias', 'scale'); got {pattern!r} of type {type(pattern).__name__}."
            )
    try:
        return [re.compile(pattern) for pattern in patterns]
    except re.error as error:
        raise ValueError(
            f"{function}({', '.join(map(repr, patterns))}): {error.pattern!r} is not a regular "
            f"expression: {error}."
        ) from None


def _listed(names: list[str], most: int = 12) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
