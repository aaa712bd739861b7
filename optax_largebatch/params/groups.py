"""Parameter groups: hyperparameters that differ from one group of parameters to another."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import itertools
from typing import Any, NamedTuple

import jax
import optax

from optax_largebatch import arguments
from optax_largebatch.arguments import Scalar
from optax_largebatch.params.masks import select_leaves
from optax_largebatch.params.paths import leaf_names
from optax_largebatch.params.rules import Rule
from optax_largebatch.params.stacked import NOT_STACKED, Stacked, check_stacked


@dataclasses.dataclass(frozen=True)
class ParamGroups:
    """The result of `param_groups`: pass it as the argument `groups` of an optimizer."""

    rules: tuple[Rule, ...]
    settings: tuple[Mapping[str, Any], ...]
    stacked: Stacked = NOT_STACKED
    """The stacks among the parameters; the optimizer fills them in."""

    def __hash__(self) -> int:
        settings = tuple(frozenset(setting.items()) for setting in self.settings)
        return hash((self.rules, settings, self.stacked))

    def indices(self, params: Any) -> list[int]:
        """The number of each leaf's group, or -1 for a parameter that is in no group."""
        if not self.rules:
            return [-1] * len(jax.tree.leaves(params))
        blocks = self.stacked.blocks(params)
        members = [
            select_leaves("groups", rule, blocks, "Leave the group out.") for rule in self.rules
        ]
        of_leaves = list(zip(*members, strict=True))
        for leaf, flags in enumerate(of_leaves):
            if sum(flags) > 1:
                first, second, *_ = itertools.compress(self.rules, flags)
                raise ValueError(
                    f"groups: the parameter {leaf_names(params)[leaf]!r} is in two groups, "
                    f"{first} and {second}. Each parameter may be in one: narrow one of the rules."
                )
        return [flags.index(True) if any(flags) else -1 for flags in of_leaves]

    def per_group(self, name: str, default: Any) -> "Grouped":
        """The hyperparameter `name`, with `default` for the groups that do not set it."""
        values = tuple(setting.get(name, default) for setting in self.settings)
        if name == "learning_rate":
            scales = (setting.get("learning_rate_scale") for setting in self.settings)
            values = tuple(map(scaled_rate, values, scales))
        return Grouped(name, self.indices, (*values, default))


Owners = Callable[[Any], Sequence[str]]
"""A function of the parameters that returns the name of each one's owner, in the order of
`jax.tree.leaves`: who moves it."""


class Grouped(NamedTuple):
    """One hyperparameter with several values, each for some of the parameters."""

    name: str
    indices: Callable[[Any], list[int]]
    """From the parameters to the index into `values` for each leaf."""
    values: tuple[Any, ...]
    allowed: str = "[0, inf)"
    """The range of its values."""

    def map(self, function: Callable[[Any], Any]) -> "Grouped":
        """The hyperparameter with `function` applied to the value of each group."""
        return self._replace(values=tuple(map(function, self.values)))

    def of_each(self, params: Any) -> list[Any]:
        """The value of each leaf, which may be a schedule."""
        return [self.values[index] for index in self.indices(params)]

    def at(self, count: jax.Array) -> tuple[Any, ...]:
        """The values at the step `count`, schedules evaluated."""
        return tuple(
            arguments.number_at(count, self.name, value, self.allowed) for value in self.values
        )


def param_groups(*groups: Mapping[str, Any]) -> ParamGroups:
    r"""Gives groups of parameters another learning rate or weight decay.

    Each group is a dictionary with the key `params`, a rule that selects its members, and any of

    - `learning_rate`: a float or a schedule, in place of the optimizer's;
    - `learning_rate_scale`: a factor, 0 or more, for the group's or the optimizer's learning rate:
      0.1 for a tenth of the common schedule;
    - `weight_decay`: a float or a schedule, in place of the optimizer's.

    Where a group does not set a value, and for parameters in no group, the optimizer's own
    arguments apply. Schedules are called with the number of steps taken before this one (0 at
    first).

    Args:
        *groups: the dictionaries.

    Returns:
        The argument `groups` of an optimizer.

    Raises:
        TypeError: a group is no dictionary, or a value has the wrong type.
        ValueError: a key is unknown, `params` is missing, or a value is out of its range; and,
            when the groups meet the parameters, a pattern matches none of them or a parameter is
            in two groups.

    Examples:
        >>> import optax
        >>> from optax_largebatch import lamb, matching, param_groups
        >>> groups = param_groups(
        ...     {"params": matching("bias", "scale"), "weight_decay": 0.0},
        ...     {"params": matching("embed"), "learning_rate": optax.linear_schedule(0.0, 1e-3, 9)},
        ...     {"params": matching("head"), "learning_rate_scale": 0.1},
        ... )
        >>> optimizer = lamb(1e-2, weight_decay=0.01, groups=groups)

    References:
        MindSpore, `nn.Optimizer`: the argument `params` as a list of dictionaries.
    """
    checked = [_check_group(group) for group in groups]
    return ParamGroups(tuple(rule for rule, _ in checked), tuple(values for _, values in checked))


def check_groups(
    groups: Any,
    stacked: Any = None,
    *unknown: str,
) -> ParamGroups:
    """The groups from the arguments of an optimizer; without `groups` there are none.

    Args:
        groups: the argument `groups`.
        stacked: the argument `stacked`.
        *unknown: hyperparameters that the optimizer does not have.

    Returns:
        The groups.

    Raises:
        TypeError: `groups` is not what `param_groups` returns.
        ValueError: a group sets an unknown hyperparameter.
    """
    if groups is None:
        return ParamGroups((), ())
    if not isinstance(groups, ParamGroups):
        raise TypeError(
            "groups must be None or what param_groups(...) returns, "
            f"got {groups!r} of type {type(groups).__name__}."
        )
    for rule, setting in zip(groups.rules, groups.settings, strict=True):
        for name in sorted({*unknown} & setting.keys()):
            raise ValueError(
                f"groups: the group of {rule} sets {name!r}, which this optimizer does not "
                "have. Leave it out of the group."
            )
    return dataclasses.replace(groups, stacked=check_stacked(stacked))


def as_grouped(name: str, value: Any, allowed: str = "[0, inf)") -> Grouped:
    """A hyperparameter as a `Grouped`, after checking that its values are allowed."""
    if not isinstance(value, Grouped):
        value = Grouped(name, ParamGroups((), ()).indices, (value,))
    for of_group in value.values:
        arguments.check_number_or_schedule(name, of_group, allowed)
    return value._replace(allowed=allowed)


def unless_others(rate: Grouped, of_others: Grouped, owners: Owners) -> Grouped:
    """One hyperparameter, with other values for the parameters whose owner is called `others`."""

    def indices(params: Any) -> list[int]:
        choices = zip(rate.indices(params), of_others.indices(params), owners(params), strict=True)
        return [  # the last value of either may have the index -1
            size + other % len(of_others.values) if owner == "others" else own % size
            for own, other, owner in choices
        ]

    size = len(rate.values)
    names = dict.fromkeys((rate.name, of_others.name))
    return Grouped(" or ".join(names), indices, rate.values + of_others.values, rate.allowed)


def scaled_rate(rate: Any, scale: Scalar | None) -> Any:
    """A learning rate, or a schedule of it, times a factor; None if there is no rate."""
    if scale is None:
        return rate
    arguments.check_number_or_schedule("learning_rate", rate, "[0, inf)")
    if callable(rate):
        return lambda count: scale * arguments.number_at(count, "learning_rate", rate)
    return scale * rate


def _check_group(group: Mapping[str, Any]) -> tuple[Rule, Mapping[str, Any]]:
    if not isinstance(group, Mapping):
        raise TypeError(
            "each group must be a dictionary such as {'params': matching('bias'), "
            f"'weight_decay': 0.0}}, got {group!r} of type {type(group).__name__}."
        )
    allowed = ("params", "learning_rate", "learning_rate_scale", "weight_decay")
    for key in group:
        if key not in allowed:
            hint = " Put centralize_gradients(rule) in front of the optimizer."
            raise ValueError(
                f"a group has the unknown key {key!r}; the keys are {', '.join(allowed)}."
                f"{hint if key == 'grad_centralization' else ''}"
            )
    rule = group.get("params")
    if not isinstance(rule, Rule):
        raise TypeError(
            "a group's 'params' must be a rule, such as matching('bias') or at_least_ndim(2); "
            f"got {rule!r} of type {type(rule).__name__}."
        )
    setting = {key: value for key, value in group.items() if key != "params"}
    for key in ("learning_rate", "weight_decay"):
        as_grouped(f"a group's {key!r}", setting.get(key, 0.0))
    if "learning_rate_scale" in setting:
        scale = setting["learning_rate_scale"]
        arguments.check_number("a group's 'learning_rate_scale'", scale, "[0, inf)")
    return rule, setting


Hyperparameter = float | jax.Array | optax.Schedule | Grouped
"""A number, a schedule of the step, or one of these for each group (`ParamGroups.per_group`)."""
