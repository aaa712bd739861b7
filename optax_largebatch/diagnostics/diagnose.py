"""Finds common mistakes in a run's setup from its state, and says so in sentences."""

from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from optax_largebatch.diagnostics.faults_of_ratios import (
    Ratio,
    at_a_bound,
    exploded,
    not_finite,
    options_of,
)
from optax_largebatch.diagnostics.of_optimizer import Optimizer, optimizer_first
from optax_largebatch.diagnostics.state_parts import by_parameter, parts
from optax_largebatch.diagnostics.step_metrics import counted
from optax_largebatch.diagnostics.trust_ratios import ratios_of
from optax_largebatch.norms import from_sum_of_squares, sum_of_squares
from optax_largebatch.params.likely_stacks import declaration, likely_stacks
from optax_largebatch.params.masks import Mask, check_mask, resolve_mask
from optax_largebatch.params.paths import leaf_names
from optax_largebatch.params.stacked import NOT_STACKED, Stacked, Stacks, check_stacked
from optax_largebatch.transforms.hyperball import HyperballState
from optax_largebatch.transforms.learning_rate import ScaleByLearningRateState
from optax_largebatch.wrappers.loss_scale import DynamicLossScaleState
from optax_largebatch.wrappers.nonfinite import SkipNonfiniteState

SMALL_LOSS_SCALE = 128
"""Below this loss scale, little of a float16 gradient is kept from vanishing."""
LARGE_ANGLE = 1.0
"""In radians: above it a layer on a sphere keeps less than half of its direction."""


@overload
def diagnose(
    optimizer: Optimizer,
    state: Any,
    params: Any,
    *,
    weight_decay_mask: Mask = None,
    stacked: Stacks = None,
) -> list[str]: ...


@overload
def diagnose(
    state: Any, params: Any, *, weight_decay_mask: Mask = None, stacked: Stacks = None
) -> list[str]: ...


def diagnose(  # pyright: ignore[reportInconsistentOverload]
    optimizer: Any = None,
    state: Any = None,
    params: Any = None,
    *,
    weight_decay_mask: Mask = None,
    stacked: Stacks = None,
) -> list[str]:
    r"""Finds common mistakes with layer-wise adaptation, and says what to do.

    Call it as `diagnose(optimizer, state, params)`. The optimizer knows its stacks of layers, which
    parameters it adapts, and the bounds on their trust ratios. `diagnose(state, params)` needs the
    argument `stacked` if the optimizer has it, and can only guess at bounds.

    It finds adapted biases and scales, parameters that look like stacks of layers and have one
    ratio for all layers, and parameters that are zero or not finite. It finds trust ratios that are
    at a bound, not finite, more than 100 times the median, or less than a 100th of it. It finds
    layers on a sphere (`muonh`) that turn by more than a radian in a step. It finds a
    decay mask that leaves out everything, and groups of parameters whose learning rate is 0. It
    finds steps that were left out because a gradient was not finite, and a loss scale that fell. It
    advises only arguments that the optimizer has. It reads existing arrays: call it between steps,
    outside of `jit`.

    Args:
        optimizer: the optimizer, of this library or with one inside. It may be wrapped by optax and
            by this library.
        state: its state after at least one step.
        params: the parameters.
        weight_decay_mask: the argument of the optimizer.
        stacked: the argument of the optimizer, if the optimizer is not given.

    Returns:
        Sentences with the evidence and what to do; an empty list if nothing was found. If the
        optimizer is not layer-wise, one sentence says so.

    Raises:
        TypeError: an argument has the wrong type, or the state or the parameters are missing.
        ValueError: the state does not belong to these parameters or to this optimizer, or it is
            that of many models, of `jax.vmap` or `jax.pmap`; or the optimizer has other stacks than
            `stacked`.

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
    optimizer, state, params = optimizer_first(optimizer, state, params)
    check_mask("weight_decay_mask", weight_decay_mask)
    leaves = jax.tree.leaves(params)
    axes = check_stacked(stacked).axes(params)
    ratios = []
    for own, values in ratios_of(optimizer, state, params, stacked):
        axes[own.number] = own.axes
        if own.adapted:
            norms = _norms(leaves[own.number], own.axes).reshape(own.shape)
            about, options = own.part.about, options_of(own.part)
            ratios.append(Ratio(own.name, own.number, np.asarray(values), norms, about, options))
    stacks = Stacked("the stacks of the optimizer", lambda params: list(axes))
    sizes = {name: float(_norms(x)) for name, x in zip(leaf_names(params), leaves, strict=True)}
    return [
        *_nothing_layer_wise(ratios, state),
        *not_finite(ratios),
        *_not_finite_weights(sizes),
        *_one_ratio_for_layers(ratios, params, axes),
        *_adapted_vectors(ratios, params, stacks),
        *_zero(sizes),
        *at_a_bound(ratios),
        *exploded(ratios),
        *_turned_far(state),
        *_nothing_decayed(weight_decay_mask, params, stacks),
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


def _nothing_layer_wise(ratios: list[Ratio], state: Any) -> list[str]:
    if ratios or parts(state, HyperballState):
        return []
    return [
        "There is nothing layer-wise here: no parameter has a trust ratio, and only the rest was "
        "looked at. Optimizers with a ratio for each layer are lamb, lans, lars, larc and lbsgd; "
        "muonh and adamh keep the norm of each layer."
    ]


def _one_ratio_for_layers(
    ratios: list[Ratio], params: Any, axes: list[tuple[int, ...]]
) -> list[str]:
    adapted = {one.number for one in ratios if one.about or np.any(one.values != 1)}
    stacks = [one for one in likely_stacks(params, axes) if one.number in adapted]
    if not stacks:
        return []
    first = stacks[0]
    return [
        f"{len(stacks)} of {len(axes)} parameters look like stacks of layers and have one trust "
        f"ratio for all layers, such as {first.name!r} of shape {first.shape}: layers with small "
        "weights are moved too far, and layers with large weights not far enough. Declare them: "
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
        "trust_ratio_mask=excluding_kinds('bias', 'norm')."
    ]


def _zero(norms: dict[str, float]) -> list[str]:
    zero = [name for name, norm in norms.items() if norm == 0]
    if not zero:
        return []
    return [
        f"{len(zero)} of {len(norms)} parameters are zero, such as {zero[0]!r}: a zero has no "
        "trust ratio, and its next step is that of the optimizer without adaptation. That is "
        "normal at the start; later, check whether it gets a gradient."
    ]


def _not_finite_weights(norms: dict[str, float]) -> list[str]:
    bad = [name for name, norm in norms.items() if not np.isfinite(norm)]
    if not bad:
        return []
    return [
        f"{len(bad)} of {len(norms)} parameters are not finite, or their norm overflows, such as "
        f"{bad[0]!r}. Go back to a checkpoint, and wrap the optimizer in skip_nonfinite."
    ]


def _nothing_decayed(mask: Mask, params: Any, stacks: Stacked) -> list[str]:
    if mask is None or any(resolve_mask("weight_decay_mask", mask, stacks.blocks(params))):
        return []
    return [
        "weight_decay_mask leaves out every parameter, so that nothing is decayed. True stands "
        "for the parameters that are decayed; invert it with ~ if it is a rule."
    ]


def _without_rate(state: Any, params: Any) -> list[str]:
    found = []
    for part in parts(state, ScaleByLearningRateState):
        rates = np.asarray(part.array("learning_rates"))
        owned = by_parameter([part], "learning_rates", state, params, NOT_STACKED)
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
    skipped = int(counted(state).get("skipped_steps", 0))
    gave_up = any(part.array("gave_up") for part in parts(state, SkipNonfiniteState))
    if not skipped:
        return []
    return [
        f"{skipped} steps were left out because a gradient was not finite. A few at "
        "the start of a run with a loss scale are usual; more call for a lower learning "
        "rate or a longer warm-up."
        + (" There were too many in a row: gave_up is True." if gave_up else "")
    ]


def _small_loss_scale(state: Any) -> list[str]:
    return [
        f"The loss scale fell to {float(part.array('loss_scale')):.4g}, and "
        f"{int(part.array('skipped'))} steps were left out on the way: the gradients themselves "
        "are large, and at so small a scale the small ones among them vanish in float16. Look at "
        "the loss, take a lower learning rate or a longer warm-up, or train in bfloat16."
        for part in parts(state, DynamicLossScaleState)
        if part.array("skipped") and part.array("loss_scale") < SMALL_LOSS_SCALE
    ]
