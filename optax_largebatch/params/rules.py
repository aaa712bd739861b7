"""Rules that select parameters by name, shape or kind."""

from collections.abc import Callable
import dataclasses
import operator
import re
from typing import Any

import jax

from optax_largebatch.arguments import check_integer
from optax_largebatch.params.names import is_called
from optax_largebatch.params.paths import Named, is_hidden, named_leaves

_Select = Callable[[Named], list[bool]]

_AXES = {"vector": 1, "scalar": 0}
KINDS = ("bias", "norm", "position", "token", *_AXES)
"""The kinds of parameters that `matching_kinds` knows."""


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
        return self._with("&", other, operator.and_)

    def __or__(self, other: "Rule") -> "Rule":
        return self._with("|", other, operator.or_)

    def __invert__(self) -> "Rule":
        return Rule(f"~{self}", _Combined(operator.not_, (self.select,)))

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self} is neither true nor false before it meets the parameters. Combine rules with "
            "&, | and ~ in place of `and`, `or` and `not`; test for None by `rule is None`; "
            "optax takes its mask: `optax.masked(optimizer, rule.mask)`."
        )

    def __repr__(self) -> str:
        return self.description

    def _with(
        self,
        sign: str,
        other: Any,
        combine: Callable[[bool, bool], bool],
    ) -> "Rule":
        """The combination with another rule."""
        if not isinstance(other, Rule):
            raise TypeError(
                f"{self} {sign} ... needs a rule on its right, such as at_least_ndim(2), got "
                f"{other!r} of type {type(other).__name__}. A function or a tree stands alone."
            )
        return Rule(f"({self} {sign} {other})", _Combined(combine, (self.select, other.select)))


def matching(*patterns: str) -> Rule:
    r"""Selects the parameters whose name matches one of the patterns.

    A name is the path joined by `/`, as in `encoder/layer_0/dense/kernel`, and a pattern is
    searched for in it with `re.search`. Anchor it to be stricter: `"b"` is found in `embed/kernel`
    as well, `"(^|/)b$"` only in parameters that are called `b`. A number at an end of a pattern is
    a whole one: `"layers/1"` is not found in `layers/10`. To leave parameters out, write
    `~matching("embed")`. The names are the same in Flax linen (boxed or not), Flax nnx, Equinox,
    Haliax and plain dictionaries.

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
    if not patterns:
        raise ValueError("matching() needs at least one string, such as matching('bias').")
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(
                "matching() takes separate strings, as in matching('bias', 'scale'); got "
                f"{pattern!r} of type {type(pattern).__name__}."
            )
        if not pattern:
            raise ValueError("matching() got an empty string, which would select everything.")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"matching(): {pattern!r} is not a regular expression: {error}."
            ) from None
    return Rule(_call("matching", patterns), _Search(patterns))


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


def matching_kinds(*kinds: str) -> Rule:
    r"""Selects the parameters of one or more kinds.

    Unlike `matching`, it works for all networks that follow the names of Flax, Haiku or Equinox. To
    leave them out, write `~matching_kinds("bias", "norm")`.
    The kinds are

    - `"bias"`: called `bias` or `b`;
    - `"norm"`: called `scale`, `gamma` or `beta`; in a module whose name has `norm` in it; an array
      whose name ends with it, as `final_rmsnorm`, `norm1` or `norm_scale`; all that is, or is in,
      `bn`, `gn` or `ln`, as `ln1`, `attn_ln` and `ln_f`; and the scale of a layer, as `gamma_1`;
    - `"vector"`: of exactly one axis;
    - `"scalar"`: of no axes;
    - `"position"`: a position embedding, such as `pos_embedding`;
    - `"token"`: a class token, such as `cls`.

    A bias may have two axes, as in Flax's attention, where it has one in PyTorch: there, `"vector"`
    alone would miss it. Indices at the end of a name do not count: the arrays of a list that is
    called `bias` are biases.

    Args:
        *kinds: at least one.

    Returns:
        A rule, for any argument that takes a mask.

    Raises:
        ValueError: no kind is given, or an unknown one; or, when the rule meets the parameters,
            none of them is of these kinds.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import matching_kinds
        >>> params = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}}
        >>> matching_kinds("bias", "norm").mask(params)
        {'dense': {'bias': True, 'kernel': False}}
        >>> (~matching_kinds("bias", "norm")).mask(params)
        {'dense': {'bias': False, 'kernel': True}}
    """
    if not kinds or any(kind not in KINDS for kind in kinds):
        raise ValueError(
            f"matching_kinds() needs one or more of {', '.join(map(repr, KINDS))}; got "
            f"{', '.join(map(repr, kinds)) or 'nothing'}."
        )
    return Rule(_call("matching_kinds", kinds), _OfKinds(kinds))


@dataclasses.dataclass(frozen=True)
class _Search:
    """Selects the names in which one of the patterns is found."""

    patterns: tuple[str, ...]

    def __call__(self, named: Named) -> list[bool]:
        # None is no parameter: frozen, or the activation of a module.
        names = [name for name, _ in named]
        parameters = [name for name, leaf in named if leaf is not None]
        chosen = []
        for pattern in self.patterns:
            search = whole_numbers(pattern).search
            # No names: optax calls `init` with a placeholder in the place of parameters.
            if parameters and not any(map(search, parameters)):
                raise ValueError(
                    f"the pattern {pattern!r} matches no parameter. The names are: "
                    f"{listed(parameters)}. {WITHOUT_NAMES if are_numbers(names) else CORRECT}"
                )
            chosen.append(map(search, names))
        return [any(matches) for matches in zip(*chosen, strict=True)]


CORRECT = "Correct the pattern, or leave it out."
WITHOUT_NAMES = (
    "The parameters of a list have no names. Pass a dictionary, as in Keras "
    "{v.path: v.value for v in model.trainable_variables}."
)


def are_numbers(names: list[str]) -> bool:
    """Whether parameters are in a list, where their names are numbers."""
    return all(name.isdigit() for name in names)


def whole_numbers(pattern: str) -> re.Pattern[str]:
    """The pattern, compiled. A number at one of its ends is a whole one: `layers/1` is not 10."""
    before = r"(?<!\d)" if pattern[0].isdigit() else ""
    after = r"(?!\d)" if pattern[-1].isdigit() else ""
    return re.compile(f"{before}{pattern}{after}")


@dataclasses.dataclass(frozen=True)
class _AtLeastNdim:
    ndim: int

    def __call__(self, named: Named) -> list[bool]:
        return [getattr(leaf, "ndim", 0) >= self.ndim for _, leaf in named]


@dataclasses.dataclass(frozen=True)
class _OfKinds:
    kinds: tuple[str, ...]
    may_be_none: bool = False

    def __call__(self, named: Named) -> list[bool]:
        selected = [
            leaf is not None and any(_is_of(kind, name, leaf) for kind in self.kinds)
            for name, leaf in named
        ]
        leaves = [leaf for _, leaf in named if leaf is not None]
        is_known = all(hasattr(leaf, "ndim") for leaf in leaves)
        if leaves and is_known and not any(selected) and not self.may_be_none:
            raise ValueError(
                f"no parameter is of the kinds {', '.join(self.kinds)}. The names are: "
                f"{listed([name for name, _ in named])}. Select by matching(...), or all."
            )
        return selected


def _is_of(kind: str, name: str, leaf: Any) -> bool:
    if kind in _AXES:
        return getattr(leaf, "ndim", None) == _AXES[kind]
    return is_called(kind, name)


VECTORS = Rule("biases, norms and vectors", _OfKinds(("bias", "norm", "vector"), may_be_none=True))
"""What is not decayed by default; a network may have none of it."""


@dataclasses.dataclass(frozen=True)
class _Combined:
    """What an operator makes of the choices of one or two rules."""

    operator: Callable[..., bool]
    selects: tuple[_Select, ...]

    def __call__(self, named: Named) -> list[bool]:
        choices = [select(named) for select in self.selects]
        return [self.operator(*flags) for flags in zip(*choices, strict=True)]


def _call(function: str, strings: tuple[str, ...]) -> str:
    """The call as it is written."""
    return f"{function}({', '.join(map(repr, strings))})"


def listed(names: list[str], most: int = 12) -> str:
    """The first names, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
