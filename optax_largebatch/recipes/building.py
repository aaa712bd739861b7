"""The calls that build the optimizer and the schedule of a recipe."""

from typing import Any

from optax_largebatch.recipes.calls import Call, Variable
from optax_largebatch.recipes.settings import Settings

ARGUMENTS = {
    "lamb": (
        "b1", "b2", "eps", "weight_decay", "max_grad_norm", "bias_correction", "param_norm_bounds",
        "trust_ratio_bounds", "trust_ratio_eps",
    ),
    "lans": ("b1", "b2", "eps", "weight_decay"),
    "lars": (
        "weight_decay", "trust_coefficient", "eps", "momentum", "denominator",
        "learning_rate_in_momentum",
    ),
    "larc": ("weight_decay", "trust_coefficient", "eps", "momentum", "clip"),
    "sgd": ("momentum", "weight_decay"),
}  # fmt: skip
"""The numbers that an algorithm takes from its recipe, besides the learning rate."""


def schedule_call(recipe: Settings, peak: float) -> Call:
    """The schedule of a recipe, for its own learning rate or another one."""
    scale = peak / recipe.learning_rate
    end, begin = recipe.end_value * scale, recipe.warmup_begin_value * scale
    warmup = recipe.warmup_steps
    if recipe.decay == "inverse_sqrt":
        named = {"peak_value": peak, "warmup_steps": warmup}
        return Call("lb.warmup_inverse_sqrt", (), named)
    if recipe.decay == "exponential":
        epoch = recipe.steps_per_stair or 1
        named = {
            "init_value": peak / (warmup + 1),
            "peak_value": peak,
            "warmup_steps": warmup,
            "transition_steps": epoch,
            "decay_rate": recipe.decay_rate,
            # The first epoch after the hold has the first factor.
            "transition_begin": (recipe.hold_steps or 0) - epoch,
            "staircase": True,
            "end_value": end,
        }
        return Call("optax.warmup_exponential_decay_schedule", (), named)
    if recipe.decay == "drops":
        assert recipe.drops is not None
        drops = [round(part * recipe.total_steps) for part in recipe.drops]
        named = {"peak_value": peak, "drop_steps": drops}
        named |= _not_default(warmup_steps=warmup, warmup_begin_value=begin)
        return Call("lb.warmup_drops", (), named)
    named = {"peak_value": peak, "total_steps": recipe.total_steps, "decay": recipe.decay}
    named |= _not_default(
        power=recipe.power,
        end_value=end,
        warmup_steps=warmup,
        warmup_begin_value=begin,
        warmup_begin_step=recipe.warmup_begin_step,
        hold_steps=recipe.hold_steps,
        steps_per_stair=recipe.steps_per_stair,
    )
    if recipe.decay_from_start:
        named["decay_begin_step"] = 0
    return Call("lb.warmup_decay", (), named)


def optimizer_call(recipe: Settings, decayed: Any, adapted: Any, stacked: Any = None) -> Call:
    """The optimizer of a recipe.

    Args:
        recipe: the settings of the recipe.
        decayed: the mask of the weight decay, or the call of one; None for all parameters.
        adapted: the mask of the trust ratio, in the same form.
        stacked: the argument `stacked` of the optimizer.

    Returns:
        The call.
    """
    schedule = Variable("schedule", schedule_call(recipe, recipe.learning_rate))
    own = {name: getattr(recipe, name) for name in ARGUMENTS[recipe.algorithm]}
    own = {name: value for name, value in own.items() if value is not None}
    stack = {} if stacked is None else {"stacked": stacked}
    if recipe.algorithm == "sgd":
        return Call(
            "lb.chain",
            (
                Call("lb.add_decayed_weights", (own["weight_decay"], decayed), stack),
                Call("lb.accumulate_momentum", (own["momentum"],), {"nesterov": True}),
                Call("lb.scale_by_learning_rate", (schedule,)),
            ),
        )
    if decayed is not None:
        own["weight_decay_mask"] = decayed
    if adapted is not None:
        own["trust_ratio_mask"] = adapted
    if recipe.bias_learning_rate is not None:
        own["groups"] = Call("lb.param_groups", (_biases(recipe, decayed),))
    return Call(f"lb.{recipe.algorithm}", (schedule,), own | stack)


def spared(kinds: tuple[str, ...]) -> Call | None:
    """The mask that leaves out some kinds of parameters."""
    return Call("~lb.matching_kinds", kinds) if kinds else None


def _biases(recipe: Settings, decayed: Any) -> dict[str, Any]:
    """The group of the parameters that are not decayed, with its own rate."""
    rate = Variable("bias_schedule", schedule_call(recipe, recipe.bias_learning_rate or 0.0))
    own = isinstance(decayed, Call)
    rule = Call("lb.matching_kinds", recipe.not_decayed) if own else ~decayed
    return {"params": rule, "learning_rate": rate}


def _not_default(**arguments: Any) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value}
