"""Finds common mistakes in a run's setup from its state, and says so in sentences."""

import inspect
from typing import Any, NamedTuple

import jax
import numpy as np

from optax_largebatch.diagnostics.state_parts import Part, by_parameter, parts
from optax_largebatch.diagnostics.step_metrics import counted
from optax_largebatch.diagnostics.trust_ratios import ratios_of
from optax_largebatch.norms import from_sum_of_squares, sum_of_squares
from optax_largebatch.optimizers.lamb import lamb
from optax_largebatch.optimizers.lans import lans
from optax_largebatch.optimizers.lars import larc, lars
from optax_largebatch.optimizers.lbsgd import lbsgd
from optax_largebatch.params.masks import Mask, check_mask, resolve_mask
from optax_largebatch.params.paths import leaf_names
from optax_largebatch.params.stacked import NOT_STACKED, Stacked, check_stacked
from optax_largebatch.transforms.lars import ScaleByLarsState
from optax_largebatch.transforms.learning_rate import ScaleByLearningRateState
from optax_largebatch.wrappers.loss_scale import DynamicLossScaleState
from optax_largebatch.wrappers.nonfinite import SkipNonfiniteState

EXPLODED = 100
"""`diagnose` reports a trust ratio that is this many times the median of all."""

SMALL_LOSS_SCALE = 128
"""Below this loss scale, little of a float16 gradient is kept from vanishing."""


class _Ratio(NamedTuple):
    """The trust ratios of one parameter in one part of the state."""

    name: str
    number: int
    """The number of the parameter among the leaves."""
    values: np.ndarray
    options: frozenset[str]
    """The arguments of the optimizer that adapts the parameter."""

    def largest(self) -> float:
        """The largest trust ratio of an adapted block."""
        return float(np.max(self.values, where=self.values != 1, initial=-np.inf))

    def smallest(self) -> float:
        """The smallest trust ratio of an adapted block."""
        return float(np.min(self.values, where=self.values != 1, initial=np.inf))


def diagnose(
    state: Any,
    params: Any,
    *,
    weight_decay_mask: Mask = None,
    stacked: Stacked | None = None,
) -> list[str]:
    r"""Finds common mistakes with layer-wise adaptation, and says what to do.

    It finds adapted biases and scales, and parameters that are zero. It finds trust ratios that are
    at a bound, not finite, more than 100 times the median, or less than a 100th of it. It finds a
    decay mask that leaves out everything, and groups of parameters whose learning rate is 0. It
    finds steps that were left out because a gradient was not finite, and a loss scale that fell. It
    advises only arguments that the optimizer has. It reads existing arrays: call it between steps,
    outside of `jit`.

    Args:
        state: the state of an optimizer of this library after at least one step, however it is
            wrapped.
        params: the parameters.
        weight_decay_mask: the argument of the optimizer.
        stacked: the argument of the optimizer.

    Returns:
        Sentences with the evidence and what to do; an empty list if nothing was found. If the
        optimizer is not layer-wise, one sentence says so.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the state does not belong to these parameters, or it is that of many models, of
            `jax.vmap` or `jax.pmap`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import diagnose, lamb
        >>> params = {"bias": jnp.ones(2), "kernel": jnp.ones((2, 2))}
        >>> optimizer = lamb(0.1)
        >>> updates, state = optimizer.update(params, optimizer.init(params), params)
        >>> params["bias"] = 2 * params["bias"]
        >>> updates, state = optimizer.update(params, state, params)
        >>> for sentence in diagnose(state, params):
        ...     print(sentence[:71])
        1 of 1 parameters with a single axis are adapted, such as 'bias' (ratio
    """
    check_mask("weight_decay_mask", weight_decay_mask)
    stacks = check_stacked(stacked)
    ratios = [
        _Ratio(own.name, own.number, np.asarray(values), _options(own.part))
        for own, values in ratios_of(state, params, stacks)
    ]
    return [
        *_nothing_layer_wise(ratios),
        *_not_finite(ratios),
        *_adapted_vectors(ratios, params, stacks),
        *_zero(params),
        *_at_a_bound(ratios),
        *_exploded(ratios),
        *_nothing_decayed(weight_decay_mask, params, stacks),
        *_without_rate(state, params),
        *_left_out(state),
        *_small_loss_scale(state),
    ]


def _options(part: Part) -> frozenset[str]:
    """The arguments of the optimizer that has this part, as far as its state tells it."""
    if part.kind is ScaleByLarsState:
        candidates = [lars, larc, lbsgd]
    else:
        candidates = [
            lans if "momentum_branch" in part.keys or "gradient_branch" in part.keys else lamb
        ]
    return frozenset.intersection(*(frozenset(inspect.signature(x).parameters) for x in candidates))


def _all(ratios: list[_Ratio]) -> np.ndarray:
    """The ratios of all blocks."""
    return np.concatenate([np.zeros(0), *(ratio.values.ravel() for ratio in ratios)])


def _nothing_layer_wise(ratios: list[_Ratio]) -> list[str]:
    if ratios:
        return []
    return [
        "There is nothing layer-wise here: the state holds no trust ratios, and only the rest was "
        "looked at. Optimizers with a ratio for each layer are lamb, lans, lars, larc and lbsgd."
    ]


def _not_finite(ratios: list[_Ratio]) -> list[str]:
    bad = [ratio.name for ratio in ratios if not np.all(np.isfinite(ratio.values))]
    if not bad:
        return []
    return [
        f"{len(bad)} of {len(ratios)} parameters have a trust ratio that is not finite, such as "
        f"{bad[0]!r}: their weights are not finite, or the norm overflows. Go back to a "
        "checkpoint, and wrap the optimizer in skip_nonfinite."
    ]


def _adapted_vectors(ratios: list[_Ratio], params: Any, stacks: Stacked) -> list[str]:
    blocks = jax.tree.leaves(stacks.blocks(params))
    vectors = {number for number, leaf in enumerate(blocks) if leaf.ndim < 2}
    names = leaf_names(params)
    adapted = {
        ratio.number: ratio.values
        for ratio in ratios
        if ratio.number in vectors and not np.allclose(ratio.values, 1, rtol=1e-3)
    }
    if not adapted:
        return []
    number, values = max(adapted.items(), key=lambda item: float(np.max(np.abs(item[1]))))
    return [
        f"{len(adapted)} of {len(vectors)} parameters with a single axis are adapted, such as "
        f"{names[number]!r} (ratio {float(np.max(values)):.3g}): biases and scales start at 0 or "
        "1, so that their norms say little about their step. Leave them out with "
        "trust_ratio_mask=at_least_ndim(2)."
    ]


def _zero(params: Any) -> list[str]:
    norms = [float(from_sum_of_squares(sum_of_squares(leaf))) for leaf in jax.tree.leaves(params)]
    zero = [name for name, norm in zip(leaf_names(params), norms, strict=True) if norm == 0]
    if not zero:
        return []
    return [
        f"{len(zero)} of {len(norms)} parameters are zero, such as {zero[0]!r}: a zero has no "
        "trust ratio, and its next step is that of the optimizer without adaptation. That is "
        "normal at the start; later, check whether it gets a gradient."
    ]


def _at_a_bound(ratios: list[_Ratio]) -> list[str]:
    found = []
    everything = _all(ratios)
    bounds = ("trust_ratio_bounds", "param_norm_bounds")
    bounded = _all([ratio for ratio in ratios if ratio.options.intersection(bounds)])
    finite = bounded[np.isfinite(bounded) & (bounded != 1)]
    ends = {"upper": finite.max(initial=-np.inf), "lower": finite.min(initial=np.inf)}
    has = frozenset().union(*(ratio.options for ratio in ratios))
    for name, bound in ends.items():
        share = int(np.sum(finite == bound))
        if share >= 2:
            found.append(
                f"{share} of {everything.size} trust ratios are exactly {bound:.4g}, as an {name} "
                "bound makes them: there the step no longer follows the size of the weights. "
                f"Widen {' or '.join(x for x in bounds if x in has)}, if that was not meant."
            )
    return found


def _exploded(ratios: list[_Ratio]) -> list[str]:
    everything = _all(ratios)
    adapted = everything[np.isfinite(everything) & (everything != 1)]
    if adapted.size < 3:
        return []
    median = float(np.median(adapted))
    large = [one for one in ratios if one.largest() > median * EXPLODED]
    small = [one for one in ratios if one.smallest() < median / EXPLODED]
    sentences = []
    if large:
        shown = ", ".join(f"{one.name!r} ({one.largest():.3g})" for one in large[:3])
        cure = "bound it with trust_ratio_bounds=(None, 10.0)"
        if any("trust_ratio_bounds" not in one.options for one in large):
            cure = "leave it out with trust_ratio_mask"
        sentences.append(
            f"{len(large)} of {len(ratios)} parameters have a trust ratio far above the median "
            f"{median:.3g}: {shown}. The cause is updates that are small beside the weights, "
            f"often in an embedding with few gradients or a layer that no loss reaches; {cure}."
        )
    if small:
        shown = ", ".join(f"{one.name!r} ({one.smallest():.3g})" for one in small[:3])
        cure = "give its norm a floor with param_norm_bounds=(low, None), or leave it out with "
        if any("param_norm_bounds" not in one.options for one in small):
            cure = "leave it out with "
        sentences.append(
            f"{len(small)} of {len(ratios)} parameters have a trust ratio far below the median "
            f"{median:.3g}: {shown}. The cause is weights that are small beside their updates, as "
            "after an initialization near 0, and such a layer hardly moves; "
            f"{cure}trust_ratio_mask."
        )
    return sentences


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
