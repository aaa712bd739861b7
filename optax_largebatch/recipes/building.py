"""The calls that build the schedule and the optimizer of a recipe."""

from typing import Any

from optax_largebatch.params.stacked import Stacks
from optax_largebatch.recipes.calls import Call
from optax_largebatch.recipes.settings import Settings

ARGUMENTS = (
    "b1", "b2", "weight_decay", "trust_coefficient", "eps", "momentum", "max_grad_norm",
    "bias_correction", "param_norm_bounds", "trust_ratio_bounds", "trust_ratio_eps", "denominator",
    "learning_rate_in_momentum", "clip", "clipping_scale",
)  # fmt: skip
"""The fields of a recipe that are arguments of its optimizer, if it has them."""

SHAPE = (
    "power", "end_value", "warmup_steps", "warmup_begin_value", "warmup_begin_step", "hold_steps",
    "steps_per_stair",
)  # fmt: skip
"""The fields that are arguments of `warmup_decay`, if they are not 0."""


def schedule_call(
    recipe: Settings,
    peak: float | None = None,
    variable: str = "schedule",
) -> Call:
    """The schedule of a recipe, for its learning rate or another one."""
    peak = peak or recipe.learning_rate
    change = peak / recipe.learning_rate
    begin = recipe.warmup_begin_value * change
    end = recipe.end_value * change
    warmup = {"peak_value": peak, "warmup_steps": recipe.warmup_steps, "variable": variable}
    if recipe.decay == "inverse_sqrt":
        return Call("lb.warmup_inverse_sqrt", **warmup)
    if recipe.decay == "eden":
        return Call(
            "lb.eden",
            peak,
            lr_batches=recipe.lr_batches,
            lr_epochs=recipe.lr_epochs,
            steps_per_epoch=recipe.steps_per_stair,
            warmup_batches=recipe.warmup_steps,
            warmup_start=round(begin / peak, 12),
            variable=variable,
        )
    if recipe.decay == "exponential":
        epoch = recipe.steps_per_stair or 1
        return Call(
            "optax.warmup_exponential_decay_schedule",
            init_value=peak / (recipe.warmup_steps + 1),
            transition_steps=epoch,
            decay_rate=recipe.decay_rate,
            # The first epoch after the hold has the first factor.
            transition_begin=(recipe.hold_steps or 0) - epoch,
            staircase=True,
            end_value=end,
            **warmup,
        )
    if recipe.decay == "drops":
        drops = [round(part * recipe.total_steps) for part in recipe.drops or ()]
        return Call("lb.warmup_drops", drop_steps=drops, warmup_begin_value=begin, **warmup)
    shape = {name: getattr(recipe, name) for name in SHAPE}
    shape |= {"end_value": end, "warmup_begin_value": begin}
    return Call(
        "lb.warmup_decay",
        peak_value=peak,
        total_steps=recipe.total_steps,
        decay=recipe.decay,
        **{name: value or None for name, value in shape.items()},
        decay_begin_step=0 if recipe.decay_from_start else None,
        variable=variable,
    )


def optimizer_call(
    recipe: Settings,
    mask: Any = None,
    stacked: Stacks = None,
) -> Call:
    """The optimizer of a recipe without Muon.

    Args:
        recipe: the settings of the recipe.
        mask: the parameters that are decayed and adapted; None for those of the recipe.
        stacked: the argument `stacked` of the optimizer.
    """
    schedule = schedule_call(recipe)
    decayed = without(recipe.not_decayed) if mask is None else mask
    adapted = without(recipe.not_adapted) if mask is None else mask
    if recipe.algorithm == "sgd":
        return Call(
            "lb.chain",
            Call("lb.add_decayed_weights", recipe.weight_decay, decayed, stacked=stacked),
            Call("lb.accumulate_momentum", recipe.momentum, nesterov=True),
            Call("lb.scale_by_learning_rate", schedule),
        )
    groups = None
    if recipe.bias_learning_rate is not None:
        biases = Call("lb.matching_kinds", *recipe.not_decayed) if mask is None else ~mask
        rate = schedule_call(recipe, recipe.bias_learning_rate, "bias_schedule")
        groups = Call("lb.param_groups", {"params": biases, "learning_rate": rate})
    return Call(
        f"lb.{recipe.algorithm}",
        schedule,
        **{name: getattr(recipe, name) for name in ARGUMENTS},
        weight_decay_mask=decayed,
        trust_ratio_mask=adapted,
        groups=groups,
        stacked=stacked,
    )


def without(kinds: tuple[str, ...]) -> Call | None:
    """The mask that leaves out some kinds of parameters."""
    return Call("~lb.matching_kinds", *kinds) if kinds else None
