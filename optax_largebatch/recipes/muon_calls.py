"""The calls that build the optimizer of a recipe of Muon or MuonH."""

import dataclasses
from typing import Any, NamedTuple

from optax_largebatch.params.matrices import MatrixAxes
from optax_largebatch.params.rules import Rule
from optax_largebatch.params.stacked import Stacks
from optax_largebatch.recipes.building import schedule_call, spared
from optax_largebatch.recipes.calls import Call, Variable, method
from optax_largebatch.recipes.settings import Group, Settings

ARGUMENTS = {
    "ns_coeffs": "ns_coeffs",
    "ns_steps": "ns_steps",
    "momentum": "beta",
    "matrix_eps": "eps",
    "nesterov": "nesterov",
    "bias_correction": "bias_correction",
    "grad_averaging": "grad_averaging",
    "eps_is_floor": "eps_is_floor",
    "consistent_rms": "consistent_rms",
    "ns_dtype": "ns_dtype",
}
"""The fields of a recipe, and the arguments of `muon` and `muonh` that they are."""

_DEFAULTS = {
    "nesterov": True,
    "bias_correction": "full",
    "grad_averaging": True,
    "eps_is_floor": False,
}


class Places(NamedTuple):
    """The rules of the embeddings and of the last layer of a network."""

    embeddings: Rule | None = None
    """None for the names with "embed"."""
    head: Rule | None = None
    """None for the names with "head"."""

    @property
    def rules(self) -> tuple[Any, Any]:
        """The rules, or the calls that make the default ones."""
        return (
            Call("lb.matching", ("embed",)) if self.embeddings is None else self.embeddings,
            Call("lb.matching", ("head",)) if self.head is None else self.head,
        )

    @property
    def own(self) -> tuple[Rule, Rule]:
        """The rules."""
        embeddings, head = (one() if isinstance(one, Call) else one for one in self.rules)
        return embeddings, head

    @property
    def tied(self) -> bool:
        """Whether the last layer is the embeddings, so that their settings apply."""
        return self.own[0] == self.own[1]


def optimizer_call(
    recipe: Settings,
    places: Places,
    stacked: Stacks = None,
    matrix_axes: MatrixAxes = None,
) -> Call:
    """The optimizer of a recipe of Muon or MuonH.

    Args:
        recipe: the settings of the recipe.
        places: the embeddings and the last layer.
        stacked: the argument `stacked` of the optimizer.
        matrix_axes: the argument `matrix_axes` of the optimizer.

    Returns:
        The call.
    """
    own = {argument: getattr(recipe, field) for field, argument in ARGUMENTS.items()}
    named: dict[str, Any] = {
        name: value
        for name, value in own.items()
        if value is not None and _DEFAULTS.get(name) != value
    }
    if recipe.algorithm == "muon":
        named["weight_decay"] = _matrix_decay(recipe)
    named["matrix_mask"] = _matrices(recipe, places)
    if _has_adamh(recipe, places):
        named |= {"b1": recipe.b1, "b2": recipe.b2, "adam_eps": recipe.eps}
        named["adamh_mask"] = places.rules[1]
    named["others"] = _others(recipe, places, stacked)
    if matrix_axes is not None:
        named["matrix_axes"] = matrix_axes
    if stacked is not None:
        named["stacked"] = stacked
    schedule = Variable("schedule", schedule_call(recipe, recipe.learning_rate))
    optimizer = Call(f"lb.{recipe.algorithm}", (schedule,), named)
    if recipe.max_grad_norm is None:
        return optimizer
    return Call("lb.chain", (Call("lb.clip_by_global_norm", (recipe.max_grad_norm,)), optimizer))


def _has_adamh(recipe: Settings, places: Places) -> bool:
    return recipe.head_on_sphere and not places.tied


def _group(recipe: Settings, name: str) -> Group:
    """The settings of embeddings, the last layer or the rest."""
    assert recipe.rest is not None
    return getattr(recipe, name) or recipe.rest


def _matrix_decay(recipe: Settings) -> Any:
    if not recipe.weight_decay_to_zero:
        return recipe.weight_decay
    named = {"peak_value": recipe.weight_decay, "total_steps": recipe.total_steps}
    return Variable("weight_decay", Call("lb.warmup_decay", (), named | {"decay": "cosine"}))


def _matrices(recipe: Settings, places: Places) -> Any:
    """The mask of Muon's matrices; the last layer of AdamH need not be left out."""
    if places == Places():
        return Call("~lb.matching", ("embed",) if recipe.head_on_sphere else ("embed", "head"))
    embeddings, head = places.own
    return ~embeddings if places.tied or recipe.head_on_sphere else ~(embeddings | head)


def _others(recipe: Settings, places: Places, stacked: Stacks) -> Call:
    """AdamW, whose rates and decays differ between embeddings, the last layer, and the rest."""
    rest = _group(recipe, "rest")
    groups, names = [], set()
    for name, rule in zip(("embeddings", "head"), places.rules, strict=True):
        own = _group(recipe, name)
        group = {}
        if own.learning_rate != rest.learning_rate:
            group["learning_rate"] = _rate(recipe, own, f"{name}_schedule")
        if own.weight_decay != rest.weight_decay:
            group["weight_decay"] = own.weight_decay
        is_own = name == "embeddings" or not (places.tied or recipe.head_on_sphere)
        if group and is_own:
            groups.append({"params": rule} | group)
            names |= set(group)
    variable = Variable("groups", Call("lb.param_groups", tuple(groups)))

    def of_groups(name: str, value: Any) -> Any:
        return method(variable, "per_group", name, value) if name in names else value

    parts = [Call("lb.scale_by_adam", (recipe.b1, recipe.b2, recipe.eps))]
    if rest.weight_decay or "weight_decay" in names:
        decayed = spared(recipe.not_decayed)
        mask = {} if decayed is None else {"weight_decay_mask": decayed}
        stack = {} if stacked is None else {"stacked": stacked}
        decay = of_groups("weight_decay", rest.weight_decay)
        parts.append(Call("lb.add_decayed_weights", (decay,), mask | stack))
    rate = of_groups("learning_rate", _rate(recipe, rest, "rest_schedule"))
    parts.append(Call("lb.scale_by_learning_rate", (rate,)))
    return Call("lb.chain", tuple(parts))


def _rate(recipe: Settings, group: Group, name: str) -> Variable:
    """The schedule of a group: that of the matrices, but for the peak and the hold."""
    if group.learning_rate is None and recipe.others_hold_steps is None:
        return Variable("schedule", schedule_call(recipe, recipe.learning_rate))
    peak = recipe.learning_rate if group.learning_rate is None else group.learning_rate
    if recipe.others_hold_steps is not None:
        recipe = dataclasses.replace(recipe, hold_steps=recipe.others_hold_steps)
    return Variable(name, schedule_call(recipe, peak))
