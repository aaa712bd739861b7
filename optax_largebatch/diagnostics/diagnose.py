"""Finds common mistakes in a run's setup from its state, and says so in sentences."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_largebatch.diagnostics.faults_of_ratios import (
    Ratio,
    at_a_bound,
    exploded,
    not_finite,
    options_of,
)
from optax_largebatch.diagnostics.optimizer_facts import (
    Optimizer,
    OptimizerFacts,
    facts_about,
    forgotten_stacks,
)
from optax_largebatch.diagnostics.state_parts import by_parameter, parts
from optax_largebatch.diagnostics.trust_ratios import ratios_of
from optax_largebatch.norms import from_sum_of_squares, sum_of_squares
from optax_largebatch.params.likely_stacks import declaration
from optax_largebatch.params.paths import leaf_names
from optax_largebatch.params.stacked import Stacked
from optax_largebatch.transforms.hyperball import HyperballState
from optax_largebatch.transforms.learning_rate import ScaleByLearningRateState
from optax_largebatch.wrappers.bad_steps import SkipBadStepsState
from optax_largebatch.wrappers.loss_scale import DynamicLossScaleState

SMALL_LOSS_SCALE = 128
"""Below this loss scale, little of a float16 gradient is kept from vanishing."""
NOT_FINITE = (
    "was not finite. A few at the start of a run with a loss scale are usual; more call for a "
    "lower learning rate or a longer warm-up."
)
SPIKES = (
    "the norm of the gradient, or the loss, was a spike or not finite. If there are many, "
    "`deviations` may be too small, or the learning rate too high."
)
OF_ZEROS = {
    "trust ratio": "a zero has no trust ratio, and its next step is that of the optimizer without "
    "adaptation. That is normal at the start; later, check whether it gets a gradient.",
    "sphere": "a step on a sphere keeps the norm, so they would stay zero. Leave them out by the "
    "mask of the optimizer.",
}
"""What happens to zeros, by what sets the length of their steps."""
LARGE_ANGLE = 1.0
"""In radians: above it a layer on a sphere keeps less than half of its direction."""


def diagnose(optimizer: Optimizer, state: Any, params: Any) -> list[str]:
    r"""Finds common mistakes in a run with layer-wise steps, and says what to do.

    It finds what `explain` marks before a run: biases and scales that have a trust ratio, stacks of
    layers that are not declared. From the state it finds trust ratios that are at a bound, not
    finite, more than 100 times the median, or less than a 100th of it, and layers on a sphere
    (`muonh`) that turn by more than a radian in a step. It finds parameters that are zero or not
    finite, groups whose learning rate is 0, steps that were left out, and a loss scale that fell.
    It advises only arguments that the optimizer has. It reads existing arrays: call it between
    steps, outside of `jit`.

    Of Muon it finds forgotten stacks, parameters that are zero or not finite, and with
    `trust_ratio=True` what it finds of LAMB. The length of its steps follows from the learning
    rate, and says nothing.

    Args:
        optimizer: the optimizer, of this library or with one inside. It may be wrapped by optax and
            by this library.
        state: its state after at least one step.
        params: the parameters.

    Returns:
        Sentences with the evidence and what to do; an empty list if nothing was found. If the
        optimizer is not layer-wise, one sentence says so.

    Raises:
        TypeError: `optimizer` is no optimizer; it comes first.
        ValueError: the state does not belong to these parameters or to this optimizer, or it is
            that of many models, of `jax.vmap` or `jax.pmap`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import diagnose, lamb
        >>> params = {"bias": jnp.ones(2), "kernel": jnp.ones((2, 2))}
        >>> optimizer = lamb(0.1)
        >>> updates, state = optimizer.update(params, optimizer.init(params), params)
        >>> params["bias"] = 2 * params["bias"]
        >>> updates, state = optimizer.update(params, state, params)
        >>> for sentence in diagnose(optimizer, state, params):
        ...     print(sentence[:71])
        1 of 1 parameters with a single axis are adapted, such as 'bias' (ratio
    """
    leaves, ratios = jax.tree.leaves(params), []
    for own, values in ratios_of(optimizer, state, params):
        if own.adapted:
            norms = _norms(leaves[own.number], own.axes).reshape(own.shape)
            bounds, options = own.part.about.bounds, options_of(own.part)
            ratios.append(Ratio(own.name, own.number, np.asarray(values), norms, bounds, options))
    facts = facts_about(optimizer, params)
    axes = facts.axes
    stacks = Stacked("the stacks of the optimizer", lambda params: list(axes))
    sizes = {name: float(_norms(x)) for name, x in zip(leaf_names(params), leaves, strict=True)}
    return [
        *_nothing_layer_wise(facts),
        *not_finite(ratios),
        *_not_finite_weights(sizes),
        *_forgotten_stacks(facts, params),
        *_adapted_vectors(ratios, params, stacks),
        *_zero(sizes, facts),
        *at_a_bound(ratios),
        *exploded(ratios),
        *_turned_far(state),
        *_without_rate(state, params),
        *_left_out(state),
        *_small_loss_scale(state),
    ]


def _turned_far(state: Any) -> list[str]:
    """Steps on spheres that are so long that little of the layer's direction is left."""
    angles = [part.array("angles") for part in parts(state, HyperballState)]
    largest = max((float(jnp.max(own)) for own in angles if own.size), default=0.0)
    if not largest > LARGE_ANGLE:
        return []
    return [
        f"A layer turned by {largest:.2g} radians in the last step: from 1 on little of its "
        "direction is kept. Lower the learning rate, or make the warm-up longer."
    ]


def _norms(leaf: Any, axes: tuple[int, ...] = ()) -> np.ndarray:
    """The norm of each block."""
    return np.asarray(from_sum_of_squares(sum_of_squares(leaf, axes)))


def _nothing_layer_wise(facts: OptimizerFacts) -> list[str]:
    lengths = {(own or {}).get("length") for own in facts.of_each}
    if lengths & OF_ZEROS.keys() or any(own and "matrices" in own for own in facts.of_each):
        return []
    return [
        "There is nothing layer-wise here: no parameter has a trust ratio, stays on a sphere or is "
        "a matrix of Muon, and only the rest was looked at. Optimizers with a ratio for each layer "
        "are lamb, lans, lars, larc and lbsgd; muonh and adamh keep the norm of each layer."
    ]


def _forgotten_stacks(facts: OptimizerFacts, params: Any) -> list[str]:
    stacks = forgotten_stacks(facts, params)
    if not stacks:
        return []
    first = stacks[0]
    harm = "layers with small weights are moved too far, and those with large ones not far enough"
    if any(own and "matrices" in own for own in facts.of_each):
        harm = "Muon takes a stack of biases for a matrix, and leaves a stack of matrices to Adam"
    return [
        f"{len(stacks)} of {len(facts.axes)} parameters look like stacks of layers that are not "
        f"declared, such as {first.name!r} of shape {first.shape}: {harm}. Declare them: "
        f"stacked={declaration(one.entry for one in stacks)}."
    ]


def _adapted_vectors(ratios: list[Ratio], params: Any, stacks: Stacked) -> list[str]:
    blocks = jax.tree.leaves(stacks.blocks(params))
    vectors = {number for number, leaf in enumerate(blocks) if leaf.ndim < 2}
    names = leaf_names(params)
    adapted = {}
    for ratio in ratios:
        finite = ratio.values[np.isfinite(ratio.values)]
        if ratio.number in vectors and not np.allclose(finite, 1, rtol=1e-3):
            adapted[ratio.number] = finite
    if not adapted:
        return []
    number, values = max(adapted.items(), key=lambda item: float(np.max(np.abs(item[1]))))
    return [
        f"{len(adapted)} of {len(vectors)} parameters with a single axis are adapted, such as "
        f"{names[number]!r} (ratio {float(np.max(values)):.3g}): biases and scales start at 0 or "
        "1, so that their norms say little about their step. Leave them out with "
        "trust_ratio_mask=~matching_kinds('bias', 'norm')."
    ]


def _zero(norms: dict[str, float], facts: OptimizerFacts) -> list[str]:
    found = []
    for length, harm in OF_ZEROS.items():
        columns = zip(norms.items(), facts.of_each, strict=True)
        with_length = [own for own, known in columns if known and known.get("length") == length]
        zero = [name for name, norm in with_length if norm == 0]
        if zero:
            found.append(
                f"{len(zero)} of {len(norms)} parameters are zero, such as {zero[0]!r}: {harm}"
            )
    return found


def _not_finite_weights(norms: dict[str, float]) -> list[str]:
    bad = [name for name, norm in norms.items() if not np.isfinite(norm)]
    if not bad:
        return []
    return [
        f"{len(bad)} of {len(norms)} parameters are not finite, or their norm overflows, such as "
        f"{bad[0]!r}. Go back to a checkpoint, and wrap the optimizer in skip_bad_steps."
    ]


def _without_rate(state: Any, params: Any) -> list[str]:
    found = []
    for part in parts(state, ScaleByLearningRateState):
        rates = np.asarray(part.array("learning_rates"))
        owned = by_parameter([part], "learning_rates", state, params)
        still = [own.name for own in owned if rates[own.entries.start] == 0]
        if 0 < len(still) < len(owned):
            found.append(
                f"{len(still)} of {len(owned)} parameters had a learning rate of 0 in the last "
                f"step, such as {still[0]!r}: their group says so, or they never had a gradient. "
                "Parameters that are frozen for good need no moments: optax.partition with "
                "optax.set_to_zero() saves these."
            )
    return found


def _left_out(state: Any) -> list[str]:
    found = []
    for part in parts(state, optax.ApplyIfFiniteState, DynamicLossScaleState, SkipBadStepsState):
        by_optax = part.kind is optax.ApplyIfFiniteState
        skipped = int(part.array("total_notfinite" if by_optax else "skipped"))
        reason = f"{'an update' if by_optax else 'a gradient'} {NOT_FINITE}"
        if "seen" in part.fields and part.array("seen"):
            reason = SPIKES
        if "gave_up" in part.fields and part.array("gave_up"):
            reason += " There were too many in a row: gave_up is True."
        if skipped:
            found.append(f"{skipped} steps were left out because {reason}")
    return found


def _small_loss_scale(state: Any) -> list[str]:
    return [
        f"The loss scale fell to {float(part.array('loss_scale')):.4g}, and "
        f"{int(part.array('skipped'))} steps were left out on the way: the gradients themselves "
        "are large, and at so small a scale the small ones among them vanish in float16. Look at "
        "the loss, take a lower learning rate or a longer warm-up, or train in bfloat16."
        for part in parts(state, DynamicLossScaleState)
        if part.array("skipped") and part.array("loss_scale") < SMALL_LOSS_SCALE
    ]
