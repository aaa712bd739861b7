"""The call that builds the optimizer of a recipe of Muon or MuonH."""

import dataclasses
import functools
import operator
from typing import Any

from optax_largebatch.params.matrix_axes import MatrixAxes
from optax_largebatch.params.rules import Rule
from optax_largebatch.params.stacked import Stacks
from optax_largebatch.recipes.building import schedule_call, without
from optax_largebatch.recipes.calls import Call, made
from optax_largebatch.recipes.settings import Group, Settings

ARGUMENTS = (
    "ns_coeffs", "ns_steps", "nesterov", "bias_correction", "grad_averaging", "eps_is_floor",
    "consistent_rms", "ns_dtype",
)  # fmt: skip
"""The fields of a recipe that are arguments of `muon` and `muonh`."""


def muon_call(
    recipe: Settings,
    embeddings: Rule | None = None,
    head: Rule | None = None,
    matrix_axes: MatrixAxes = None,
    stacked: Stacks = None,
) -> Call:
    """The optimizer of a recipe of Muon or MuonH.

    Args:
        recipe: the settings of the recipe.
        embeddings: the embeddings; None for the names with "embed".
        head: the last layer; None for the names with "head".
        matrix_axes: the argument `matrix_axes` of the optimizer.
        stacked: the argument `stacked` of the optimizer.
    """
    rules: dict[str, Any] = {
        "embeddings": Call("lb.matching", "embed") if embeddings is None else embeddings,
        "head": Call("lb.matching", "head") if head is None else head,
    }
    of_adamh: dict[str, Any] = {}
    if made(rules["embeddings"]) == made(rules["head"]):  # tied: it has the settings of embeddings
        del rules["head"]
    elif recipe.head_on_sphere:
        of_adamh = {"b1": recipe.b1, "b2": recipe.b2, "adam_eps": recipe.eps}
        of_adamh["adamh_mask"] = rules.pop("head")
    optimizer = Call(
        f"lb.{recipe.algorithm}",
        schedule_call(recipe),
        **{name: getattr(recipe, name) for name in ARGUMENTS},
        beta=_momentum(recipe),
        eps=recipe.matrix_eps,
        weight_decay=_decay(recipe),
        matrix_mask=_outside([*rules.values()]),
        **of_adamh,
        others=_others(recipe, rules, stacked),
        matrix_axes=matrix_axes,
        stacked=stacked,
    )
    if recipe.max_grad_norm is None:
        return optimizer
    return Call("lb.chain", Call("lb.clip_by_global_norm", recipe.max_grad_norm), optimizer)


def _outside(rules: list[Any]) -> Any:
    """The mask of what no rule matches."""
    if all(isinstance(rule, Call) for rule in rules):
        return Call("~lb.matching", *(rule.arguments[0] for rule in rules))
    return ~functools.reduce(operator.or_, map(made, rules))


def _momentum(recipe: Settings) -> Any:
    if recipe.momentum_begin_value is None:
        return recipe.momentum
    decay_begins = recipe.warmup_begin_step + recipe.warmup_steps + (recipe.hold_steps or 0)
    return Call(
        "lb.warmup_decay",
        peak_value=recipe.momentum,
        total_steps=recipe.total_steps,
        end_value=recipe.momentum_end_value,
        warmup_steps=recipe.momentum_warmup_steps,
        warmup_begin_value=recipe.momentum_begin_value,
        hold_steps=decay_begins - recipe.momentum_warmup_steps,
        variable="momentum",
    )


def _decay(recipe: Settings) -> Any:
    if recipe.algorithm == "muonh":
        return None
    if recipe.weight_decay and recipe.weight_decay_to_zero:
        return Call(
            "lb.warmup_decay",
            peak_value=recipe.weight_decay,
            total_steps=recipe.total_steps,
            decay="cosine",
            variable="weight_decay",
        )
    return recipe.weight_decay


def _others(recipe: Settings, rules: dict[str, Any], stacked: Stacks) -> Call:
    """AdamW, whose rates and decays differ between embeddings, the last layer, and the rest."""
    rest = recipe.rest or Group()
    groups = []
    for name, rule in rules.items():
        settings = getattr(recipe, name) or rest
        group = {}
        if settings.learning_rate != rest.learning_rate:
            group["learning_rate"] = _rate(recipe, settings, f"{name}_schedule")
        if settings.weight_decay != rest.weight_decay:
            group["weight_decay"] = settings.weight_decay
        if group:
            groups.append({"params": rule} | group)

    def per_group(name: str, value: Any) -> Any:
        if not any(name in group for group in groups):
            return value
        owner = Call("lb.param_groups", *groups, variable="groups")
        return Call("per_group", name, value, owner=owner)

    links = [Call("lb.scale_by_adam", recipe.b1, recipe.b2, recipe.eps)]
    decay = per_group("weight_decay", rest.weight_decay)
    if decay:
        mask = without(recipe.not_decayed)
        links.append(Call("lb.add_decayed_weights", decay, weight_decay_mask=mask, stacked=stacked))
    rate = per_group("learning_rate", _rate(recipe, rest, "rest_schedule"))
    return Call("lb.chain", *links, Call("lb.scale_by_learning_rate", rate))


def _rate(recipe: Settings, group: Group, name: str) -> Call:
    """The schedule of a group: that of the matrices, but for the peak and the hold."""
    if group.learning_rate is None and recipe.others_hold_steps is None:
        return schedule_call(recipe)
    if recipe.others_hold_steps is not None:
        recipe = dataclasses.replace(recipe, hold_steps=recipe.others_hold_steps)
    return schedule_call(recipe, group.learning_rate, name)
