"""What an optimizer says of itself: what it does with each parameter, however it is wrapped."""

from collections.abc import Sequence
from typing import Any, NamedTuple
import warnings

import jax
from jax.core import Tracer
import jax.numpy as jnp
import optax

from optax_largebatch.diagnostics.state_parts import About, parts
from optax_largebatch.engine.recorded_states import Facts, RecordedState, recorded_states
from optax_largebatch.params.likely_stacks import LikelyStack, likely_stacks
from optax_largebatch.params.owners import Keys, Part, owners
from optax_largebatch.transforms.lars import ScaleByLarsState
from optax_largebatch.transforms.trust_ratio import ScaleByTrustRatioState

LAYER_WISE = (ScaleByTrustRatioState, ScaleByLarsState)
"""The parts of a state that hold trust ratios."""

Optimizer = optax.GradientTransformation | optax.MultiSteps

STEPS_TO_TRY = (0, 1, 10, 100, 1000, 10_000)
"""Where learning rates are compared: at the first of these steps at which one is not 0."""


class OptimizerFacts(NamedTuple):
    """What an optimizer says about itself and some parameters."""

    of_each: list[dict[str, Any] | None]
    """The `Facts` of each parameter, from all transforms that see it; None where none does."""
    axes: list[tuple[int, ...]]
    """The stacked axes of each parameter, as far as they are declared."""
    ratios: dict[Keys, About]
    """What it says about each part of its state with trust ratios, by the part's keys."""


def check_optimizer(optimizer: Any) -> Optimizer:
    """The argument `optimizer` of a reader, checked.

    Raises:
        TypeError: it is no optimizer.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            "optimizer must be a gradient transformation, and comes first, as in (optimizer, "
            f"params) and (optimizer, state, params); got a {type(optimizer).__name__}."
        )
    return optimizer


def facts_about(optimizer: Any, params: Any) -> OptimizerFacts:
    """What an optimizer says about itself and these parameters.

    Its `init` is traced for that, and nothing is computed.

    Args:
        optimizer: the optimizer, of this library or with one inside.
        params: the parameters, or their shapes.

    Raises:
        TypeError: the first argument is no optimizer.
    """
    init, leaves = check_optimizer(optimizer).init, jax.tree.leaves(params)
    found = OptimizerFacts([None] * len(leaves), [()] * len(leaves), {})

    def look(params: Any) -> None:
        with recorded_states() as record:
            state = init(params)
        for made in record:
            numbers = owners(made.params, params)
            if all(_is_leaf(x, own, leaves) for x, own in zip(_leaves(made), numbers, strict=True)):
                _add(found, made, [own for own in numbers if own is not None])
        for part in parts(state, *LAYER_WISE):
            ratios = part.array("trust_ratios")
            made = next((x for x in record if getattr(x.state, "trust_ratios", 0) is ratios), None)
            if made is not None:
                found.ratios[part.keys] = _about(made, params)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what `init` warns of, it has said to the trainer
        jax.eval_shape(look, params)
    return found


def _leaves(made: RecordedState) -> list[Any]:
    return jax.tree.leaves(made.params)


def _is_leaf(seen: Any, number: int | None, leaves: list[Any]) -> bool:
    """Whether what a transform has seen is that parameter, and not, say, a small copy of it."""
    return number is not None and seen.shape == leaves[number].shape


def _add(found: OptimizerFacts, made: RecordedState, numbers: list[int]) -> None:
    """Adds what a transform says; of two directions the first counts, of all else the last."""
    facts = made.transform.facts
    columns = zip(numbers, made.transform.stacked.axes(made.params), strict=True)
    for number, axes in columns:
        found.axes[number] = tuple(sorted({*found.axes[number], *axes}))
    for number, own in zip(numbers, facts(made.params) if facts else [], strict=bool(facts)):
        before = found.of_each[number] or {}
        known = {key: value for key, value in own.items() if not isinstance(value, Tracer)}
        direction = {key: before[key] for key in ("direction",) if key in before}
        found.of_each[number] = {**before, **known, **direction}


def _about(made: RecordedState, params: Any) -> About:
    """What a transform says about its trust ratios."""
    numbers = [own for own in owners(made.params, params) if own is not None]
    facts = made.transform.facts(made.params) if made.transform.facts else [{}] * len(numbers)
    axes = made.transform.stacked.axes(made.params)
    return About(numbers, axes, ["length" in own for own in facts], _bounds(facts))


def _bounds(facts: Sequence[Facts]) -> Any:
    return next((own["bounds"] for own in facts if "bounds" in own), None)


def forgotten_stacks(about: OptimizerFacts, params: Any) -> list[LikelyStack]:
    """The stacks that are not declared, where that does harm.

    A stack has one norm for all its layers. Muon takes a stack of biases for a matrix, and leaves a
    stack of matrices to Adam.
    """
    has_muon = any(own and "matrices" in own for own in about.of_each)
    return [
        one
        for one in likely_stacks(params, about.axes)
        if has_muon or "length" in (about.of_each[one.number] or {})
    ]


def relative_rates(rates: list[Any]) -> list[float | None]:
    """Learning rates in units of the largest; None where one is not known.

    Args:
        rates: numbers or schedules of the step, or None.
    """
    for step in STEPS_TO_TRY:
        values = [_at(step, rate) for rate in rates]
        largest = max((value for value in values if value is not None), default=0.0)
        if largest > 0:
            return [None if value is None else value / largest for value in values]
    return [None] * len(rates)


def _at(step: int, rate: Any) -> float | None:
    value: Any = rate(jnp.asarray(step, jnp.int32)) if callable(rate) else rate
    return None if value is None or isinstance(value, Tracer) else float(value)


def parts_with_ratios(optimizer: Any, state: Any, params: Any) -> list[Part]:
    """The parts of a state that hold trust ratios, with what the optimizer says about them.

    Args:
        optimizer: the optimizer.
        state: its state, possibly inside another object, such as a `TrainState`.
        params: the parameters.

    Raises:
        TypeError: the first argument is no optimizer.
        ValueError: the state is not that of the optimizer.
    """
    said, found = facts_about(optimizer, params).ratios, parts(state, *LAYER_WISE)
    keys = [part.keys for part in found]
    # An object around the state adds its keys.
    above = min(map(len, keys), default=0) - min(map(len, said), default=0)
    heads = {own[: max(above, 0)] for own in keys}
    if above < 0 or len(heads) > 1 or {own[above:] for own in keys} != set(said):
        raise ValueError(
            f"state must be that of the optimizer, which has {_places(list(said))}; got a "
            f"{type(state).__name__} with {_places(keys)}. Pass the state that this optimizer's "
            "`init` or `update` returned, and the optimizer itself in place of one whose `init` "
            "is compiled."
        )
    return [part._replace(about=said[part.keys[above:]]) for part in found]


def _places(keys: list[Keys]) -> str:
    """Places of trust ratios, for the message."""
    return f"trust ratios at {', '.join(map('/'.join, keys))}" if keys else "no trust ratios"
