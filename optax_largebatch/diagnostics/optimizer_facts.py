"""What an optimizer says of itself: what it does with each parameter, however it is wrapped."""

from typing import Any, NamedTuple
import warnings

import jax
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np
import optax

from optax_largebatch.arguments import Bounds
from optax_largebatch.engine.recorded_states import Facts, RecordedState, recorded_states
from optax_largebatch.norms import from_sum_of_squares, sum_of_squares
from optax_largebatch.params.likely_stacks import LikelyStack, likely_stacks
from optax_largebatch.params.owners import Keys, owners, parts_of_kinds
from optax_largebatch.transforms.lars import ScaleByLarsState
from optax_largebatch.transforms.trust_ratio import ScaleByTrustRatioState

LAYER_WISE = (ScaleByTrustRatioState, ScaleByLarsState)
"""The parts of a state that hold trust ratios."""

Optimizer = optax.GradientTransformation | optax.MultiSteps

STEPS_TO_TRY = (0, 1, 10, 100, 1000, 10_000)
"""Where learning rates are compared: at the first of these steps at which one is not 0."""


class RatioFacts(NamedTuple):
    """What an optimizer says about the trust ratios in a part of its state."""

    axes: dict[int, tuple[int, ...]]
    """The stacked axes of their parameters, by the numbers of these."""
    adapted: list[int]
    """The numbers of the parameters that are adapted."""
    bounds: Bounds
    """The bounds on a ratio."""


class OptimizerFacts(NamedTuple):
    """What an optimizer says about itself and some parameters."""

    of_each: list[Facts | None]
    """The `Facts` of each parameter, from all transforms that see it; None where none does."""
    axes: list[tuple[int, ...]]
    """The stacked axes of each parameter, as far as they are declared."""
    ratios: dict[Keys, RatioFacts]
    """What it says about each part of its state with trust ratios, by the part's keys."""

    @property
    def lengths(self) -> list[str]:
        """What sets the length of each parameter's steps, as in `Facts`; empty if nothing does."""
        return [(facts or {}).get("length", "") for facts in self.of_each]

    @property
    def has_muon(self) -> bool:
        """Whether Muon moves some parameter."""
        return any(facts and "matrices" in facts for facts in self.of_each)


def facts_about(optimizer: Any, params: Any) -> OptimizerFacts:
    """What an optimizer says about itself and these parameters.

    Its `init` is traced for that, and nothing is computed.

    Args:
        optimizer: the optimizer, of this library or with one inside.
        params: the parameters, or their shapes.

    Raises:
        TypeError: the first argument is no optimizer.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            "optimizer must be a gradient transformation, and comes first, as in (optimizer, "
            f"params) and (optimizer, state, params); got a {type(optimizer).__name__}."
        )
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(params)]
    found = OptimizerFacts([None] * len(shapes), [()] * len(shapes), {})

    def look(params: Any) -> None:
        with recorded_states() as record:
            state = optimizer.init(params)
        parts = parts_of_kinds(state, *LAYER_WISE)
        places = {id(part.array("trust_ratios")): part.keys for part in parts}
        for made in record:
            numbers = owners(made.params, params)
            seen = jax.tree.leaves(made.params)
            # Not, say, a small copy of a parameter.
            if all(
                number is not None and x.shape == shapes[number]
                for x, number in zip(seen, numbers, strict=True)
            ):
                keys = places.get(id(getattr(made.state, "trust_ratios", None)))
                _add(found, made, [number for number in numbers if number is not None], keys)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what `init` warns of, it has said to the trainer
        jax.eval_shape(look, params)
    return found


def _add(found: OptimizerFacts, made: RecordedState, numbers: list[int], keys: Keys | None) -> None:
    """Adds what a transform says; of two directions the first counts, of all else the last.

    Args:
        found: what others have said.
        made: the state of the transform.
        numbers: the parameters that it sees.
        keys: the place of its trust ratios, if it has any.
    """
    of_each = made.transform.facts(made.params) if made.transform.facts else [{}] * len(numbers)
    axes = dict(zip(numbers, made.transform.stacked.axes(made.params), strict=True))
    for number, facts in zip(numbers, of_each, strict=True):
        found.axes[number] = tuple(sorted({*found.axes[number], *axes[number]}))
        if made.transform.facts:
            before = found.of_each[number] or {}
            new = {name: value for name, value in facts.items() if not isinstance(value, Tracer)}
            direction = {name: before[name] for name in ("direction",) if name in before}
            found.of_each[number] = {**before, **new, **direction}
    if keys is not None:
        adapted = [n for n, facts in zip(numbers, of_each, strict=True) if "length" in facts]
        bounds = next((facts["bounds"] for facts in of_each if "bounds" in facts), None)
        found.ratios[keys] = RatioFacts(axes, adapted, bounds)


def forgotten_stacks(about: OptimizerFacts, params: Any) -> list[LikelyStack]:
    """The stacks that are not declared, where that does harm.

    A stack has one norm for all its layers. Muon takes a stack of biases for a matrix, and leaves a
    stack of matrices to Adam.
    """
    likely = likely_stacks(params, about.axes)
    return [one for one in likely if about.has_muon or about.lengths[one.number]]


def relative_rates(rates: list[Any]) -> list[float | None]:
    """Learning rates in units of the largest; None where one is not known.

    Args:
        rates: numbers or schedules of the step, or None.
    """
    for step in STEPS_TO_TRY:
        at: list[Any] = [
            rate(jnp.asarray(step, jnp.int32)) if callable(rate) else rate for rate in rates
        ]
        values = [None if x is None or isinstance(x, Tracer) else float(x) for x in at]
        largest = max((value for value in values if value is not None), default=0.0)
        if largest > 0:
            return [None if value is None else value / largest for value in values]
    return [None] * len(rates)


def block_norms(x: jax.Array, stacked_axes: tuple[int, ...] = ()) -> jax.Array:
    """The norm of each block, in a shape that broadcasts."""
    return from_sum_of_squares(sum_of_squares(x, stacked_axes))
