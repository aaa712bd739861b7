"""Finds common mistakes in a run's setup from its state, and says so in sentences."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_largebatch.diagnostics.optimizer_facts import (
    Optimizer,
    OptimizerFacts,
    Ratio,
    block_norms,
    facts_about,
    forgotten_stacks,
    ratios_of,
)
from optax_largebatch.diagnostics.step_metrics import SCALARS
from optax_largebatch.params.likely_stacks import declaration
from optax_largebatch.params.owners import by_parameter, nodes_of_kinds
from optax_largebatch.params.paths import leaf_names
from optax_largebatch.transforms.hyperball import HyperballState
from optax_largebatch.transforms.learning_rate import ScaleByLearningRateState
from optax_largebatch.transforms.trust_ratio import ScaleByLarsState
from optax_largebatch.wrappers.bad_steps import SkipBadStepsState
from optax_largebatch.wrappers.loss_scale import DynamicLossScaleState

EXPLODED = 100
"""A trust ratio is reported if it is this many times the median of all."""
SMALL_LOSS_SCALE = 128
"""Below this loss scale, little of a float16 gradient is kept from vanishing."""
LARGE_ANGLE = 1.0
"""In radians: above it a layer on a sphere keeps less than half of its direction."""
NOT_FINITE = (
    "was not finite. A few at the start of a run with a loss scale are usual; more call for a "
    "lower learning rate or a longer warm-up."
)
SPIKES = (
    "the norm of the gradient, or the loss, was a spike or not finite. If there are many, "
    "`deviations` may be too small, or the learning rate too high."
)
GO_BACK = "Go back to a checkpoint, and wrap the optimizer in skip_bad_steps."
OF_ZEROS = {
    "trust ratio": "a zero has no trust ratio, and its next step is that of the optimizer without "
    "adaptation. That is normal at the start; later, check whether it gets a gradient.",
    "sphere": "they move with the first gradient that is not zero; look whether they get one.",
}
"""What happens to zeros, by what sets the length of their steps."""
FAR_ABOVE = (
    "updates that are small beside the weights, often in an embedding with few gradients; leave it "
    "out with trust_ratio_mask"
)
FAR_BELOW = (
    "weights that are small beside their updates, so that the layer hardly moves; leave it out "
    "with trust_ratio_mask"
)


def diagnose(optimizer: Optimizer, state: Any, params: Any) -> list[str]:
    r"""Finds common mistakes in a run, and says what to do.

    It finds what `explain` marks before a run: biases and scales that have a trust ratio, stacks of
    layers that are not declared. From the state it finds trust ratios that are at a bound, not
    finite, more than 100 times the median, or less than a 100th of it, and layers on a sphere
    (`muonh`) that turn by more than a radian in a step. It finds parameters that are zero or not
    finite, groups whose learning rate is 0, steps that were left out, and a loss scale that fell.
    It reads existing arrays: call it between steps, outside of `jit`.

    Of Muon it finds forgotten stacks, and parameters that are zero or not finite. The length of its
    steps follows from the learning rate, and says nothing.

    Args:
        optimizer: the optimizer, of this library or with one inside. It may be wrapped by optax and
            by this library.
        state: its state after at least one step.
        params: the parameters.

    Returns:
        Sentences with the evidence and what to do; an empty list if nothing was found. Of an
        optimizer without layer-wise steps, such as AdamW, only what any run may have is looked at.

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
    facts = facts_about(optimizer, params)
    leaves = jax.tree.leaves(params)
    ratios = [ratio for ratio in ratios_of(facts, state, params) if "length" in ratio.facts]
    lengths = (float(block_norms(x)) for x in leaves)
    norms = list(zip(leaf_names(params), lengths, strict=True))
    return [
        *_not_finite_ratios(ratios),
        *_not_finite_weights(norms),
        *_forgotten_stacks(facts, params),
        *_adapted_vectors(ratios, params, facts),
        *_zero(norms, facts),
        *_at_a_bound(ratios, leaves),
        *_far_from_the_median(ratios),
        *_turned_far(state),
        *_without_rate(state, params),
        *_left_out(state),
        *_small_loss_scale(state),
    ]


def _not_finite_ratios(ratios: list[Ratio]) -> Iterator[str]:
    """Ratios that are not finite, or 0, which is what an infinite norm of the gradient makes."""
    bad = [
        (ratio.name, x) for ratio in ratios for x in ratio.of_blocks if not np.isfinite(x) or x == 0
    ]
    if bad:
        yield (
            f"{len(dict(bad))} of {len(ratios)} parameters have a trust ratio that is not finite "
            f"or 0, such as {bad[0][0]!r} ({bad[0][1]}): their weights or gradients are not "
            f"finite, or a norm overflows. {GO_BACK}"
        )


def _not_finite_weights(norms: list[tuple[str, float]]) -> Iterator[str]:
    bad = [name for name, norm in norms if not np.isfinite(norm)]
    if bad:
        yield (
            f"{len(bad)} of {len(norms)} parameters are not finite, or their norm overflows, such "
            f"as {bad[0]!r}. {GO_BACK}"
        )


def _forgotten_stacks(facts: OptimizerFacts, params: Any) -> Iterator[str]:
    stacks = forgotten_stacks(facts, params)
    if stacks:
        harm = "layers with small weights are moved too far, those with large ones not far enough"
        if facts.has_muon:
            harm = "Muon takes a stack of biases for a matrix, and leaves one of matrices to Adam"
        yield (
            f"{len(stacks)} of {len(facts.axes)} parameters look like stacks of layers that are "
            f"not declared, such as {stacks[0].name!r} of shape {stacks[0].shape}: {harm}. Declare "
            f"them: stacked={declaration(stack.entry for stack in stacks)}."
        )


def _adapted_vectors(
    ratios: list[Ratio],
    params: Any,
    facts: OptimizerFacts,
) -> Iterator[str]:
    pairs = zip(jax.tree.leaves(params), facts.axes, strict=True)
    vectors = [number for number, (x, axes) in enumerate(pairs) if np.ndim(x) - len(axes) < 2]
    largest: dict[int, float] = {}
    for ratio in ratios:
        finite = ratio.of_blocks[np.isfinite(ratio.of_blocks)]
        if ratio.number in vectors and not np.allclose(finite, 1, rtol=1e-3):
            largest[ratio.number] = max(finite)
    if largest:
        number = max(largest, key=largest.__getitem__)
        yield (
            f"{len(largest)} of {len(vectors)} parameters with a single axis are adapted, such as "
            f"{leaf_names(params)[number]!r} (ratio {largest[number]:.3g}): biases and scales "
            "start at 0 or 1, and their norms say little. Leave them out with "
            "trust_ratio_mask=~matching_kinds('bias', 'norm')."
        )


def _zero(
    norms: list[tuple[str, float]],
    facts: OptimizerFacts,
) -> Iterator[str]:
    for length, harm in OF_ZEROS.items():
        pairs = zip(norms, facts.of_each, strict=True)
        zero = [name for (name, norm), x in pairs if norm == 0 and x.get("length") == length]
        if zero:
            yield f"{len(zero)} of {len(norms)} parameters are zero, such as {zero[0]!r}: {harm}"


def _at_a_bound(ratios: list[Ratio], leaves: list[Any]) -> Iterator[str]:
    at_bound: Counter[str] = Counter()
    for ratio in ratios:
        axes, segments = ratio.blocks
        norms = block_norms(leaves[ratio.number], axes, segments)
        norms = np.ravel(segments.first(norms) if segments else norms)
        bounds = ratio.facts["bounds"] or (None, None)
        for end, bound in zip(("a lower", "an upper"), bounds, strict=True):
            if bound is not None:
                at = (ratio.of_blocks == np.float32(bound)) & (norms > 0)
                at_bound[f"{end} bound, {float(bound):.4g}"] += int(np.sum(at))
    blocks = sum(ratio.values.size for ratio in ratios)
    for bound, number in at_bound.items():
        if number:
            yield (
                f"{number} of {blocks} trust ratios are at {bound}: there the step no longer "
                "follows the size of the weights. Widen the bound, if that was not meant."
            )


def _far_from_the_median(ratios: list[Ratio]) -> Iterator[str]:
    """Ratios that are far above or far below the median of those that are not exactly 1."""
    adapted = [(ratio, ratio.of_blocks[ratio.of_blocks != 1]) for ratio in ratios]
    adapted = [(ratio, blocks) for ratio, blocks in adapted if blocks.size]
    finite = [x for _, blocks in adapted for x in blocks if np.isfinite(x)]
    median = float(np.median(finite)) if len(finite) > 2 else np.nan
    above = [(ratio, x.max()) for ratio, x in adapted if x.max() > median * EXPLODED]
    below = [(ratio, x.min()) for ratio, x in adapted if x.min() < median / EXPLODED]
    for side, far, cause, cure, argument in (
        ("above", above, FAR_ABOVE, "bound it with", "trust_ratio_bounds"),
        ("below", below, FAR_BELOW, "give its norm a floor with", "param_norm_bounds"),
    ):
        if far:
            shown = ", ".join(f"{ratio.name!r} ({x:.3g})" for ratio, x in far[:3])
            has_it = all(argument in _bounds_of(ratio) for ratio, _ in far)
            or_bound = f", or {cure} {argument}" if has_it else ""
            yield (
                f"{len(far)} of {len(ratios)} parameters have a trust ratio far {side} the median "
                f"{median:.3g}: {shown}. The cause is {cause}{or_bound}."
            )


def _bounds_of(ratio: Ratio) -> tuple[str, ...]:
    """The arguments for bounds that all optimizers with such a part of the state have."""
    if ratio.source.kind is ScaleByLarsState:  # lars and larc
        return ()
    is_lans = not {"momentum_branch", "gradient_branch"}.isdisjoint(ratio.source.keys)
    return ("param_norm_bounds",) if is_lans else ("param_norm_bounds", "trust_ratio_bounds")


def _turned_far(state: Any) -> Iterator[str]:
    """Steps on spheres that are so long that little of the layer's direction is left."""
    angles = [node.array("angles") for node in nodes_of_kinds(state, HyperballState)]
    largest = max((float(jnp.max(x)) for x in angles if x.size), default=0.0)
    if largest > LARGE_ANGLE:
        yield (
            f"A layer turned by {largest:.2g} radians in the last step: from 1 on little of its "
            "direction is kept. Lower the learning rate, or make the warm-up longer."
        )


def _without_rate(state: Any, params: Any) -> Iterator[str]:
    for node in nodes_of_kinds(state, ScaleByLearningRateState):
        rates = np.asarray(node.array("learning_rates"))
        entries = by_parameter([node], "learning_rates", state, params)
        still = [entry.name for entry in entries if rates[entry.entries.start] == 0]
        if 0 < len(still) < len(entries):
            yield (
                f"{len(still)} of {len(entries)} parameters had a learning rate of 0 in the last "
                f"step, such as {still[0]!r}: their group says so, or they never had a gradient. "
                "What is frozen for good needs no moments: optax.partition, optax.set_to_zero()."
            )


def _left_out(state: Any) -> Iterator[str]:
    counters = SCALARS["skipped_steps"]
    for node in nodes_of_kinds(state, *counters):
        skipped = int(node.array(counters[node.kind]))
        what = "an update" if node.kind is optax.ApplyIfFiniteState else "a gradient"
        reason = f"{what} {NOT_FINITE}"
        if node.kind is SkipBadStepsState:
            reason = SPIKES if node.array("seen") else reason
            if node.array("gave_up"):
                reason += " There were too many in a row: gave_up is True."
        if skipped:
            yield f"{skipped} steps were left out because {reason}"


def _small_loss_scale(state: Any) -> Iterator[str]:
    for node in nodes_of_kinds(state, DynamicLossScaleState):
        scale = float(node.array("loss_scale"))
        skipped = int(node.array("skipped"))
        if skipped and scale < SMALL_LOSS_SCALE:
            yield (
                f"The loss scale fell to {scale:.4g}, and {skipped} steps were left out on the "
                "way: at so small a scale small gradients vanish in float16. Look at the loss, "
                "take a lower learning rate or a longer warm-up, or train in bfloat16."
            )
