"""What a run's state says about the way it is set up, in plain sentences."""

from typing import Any

import jax
import numpy as np
import optax

from optax_largebatch.diagnostics.trust_ratios import trust_ratios
from optax_largebatch.norms import from_sum_of_squares, sum_of_squares
from optax_largebatch.params.masks import Mask, check_mask, resolve_mask
from optax_largebatch.params.paths import leaf_names
from optax_largebatch.params.stacked import Stacked, check_stacked

EXPLODED = 100
"""How many times the median a trust ratio is when it is worth a sentence."""


def diagnose(
    state: Any,
    params: Any,
    *,
    weight_decay_mask: Mask = None,
    stacked: Stacked | None = None,
) -> list[str]:
    r"""Looks for what commonly goes wrong with layer-wise adaptation.

    It finds adapted biases and scales, parameters that are zero, ratios that stand at a bound,
    are not finite or are more than 100 times the median (or its 100th part), a decay mask that
    leaves out everything, and steps that `skip_nonfinite` left out. It reads arrays that are
    there anyway: call it between steps, outside of `jit`.

    Args:
        state: the state of an optimizer of this library after at least one step.
        params: the parameters.
        weight_decay_mask: what the optimizer was given.
        stacked: what the optimizer was given.

    Returns:
        Sentences with the evidence and what to do; none if nothing was found.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there are no trust ratios in the state, or not those of these parameters.

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
    by_name = {
        name: np.asarray(ratio)
        for name, ratio in trust_ratios(state, params, stacked=stacked).items()
    }
    everything = np.concatenate([ratio.ravel() for ratio in by_name.values()])
    return [
        *_not_finite(by_name),
        *_adapted_vectors(by_name, params, stacks),
        *_zero(params),
        *_at_a_bound(everything),
        *_exploded(by_name, everything),
        *_nothing_decayed(weight_decay_mask, params, stacks),
        *_left_out(state),
    ]


def _not_finite(by_name: dict[str, np.ndarray]) -> list[str]:
    bad = [name for name, ratio in by_name.items() if not np.all(np.isfinite(ratio))]
    if not bad:
        return []
    return [
        f"{len(bad)} of {len(by_name)} parameters have a trust ratio that is not finite, such as "
        f"{bad[0]!r}: their weights are not, or their norm overflows. Go back to a checkpoint, and "
        "wrap the optimizer in skip_nonfinite."
    ]


def _adapted_vectors(by_name: dict[str, np.ndarray], params: Any, stacks: Stacked) -> list[str]:
    blocks = jax.tree.leaves(stacks.blocks(params))
    vectors = [name for name, leaf in zip(leaf_names(params), blocks, strict=True) if leaf.ndim < 2]
    adapted = {
        name: ratio
        for name in vectors
        for key, ratio in by_name.items()
        if f"/{key}".endswith(f"/{name}") and not np.allclose(ratio, 1, rtol=1e-3)
    }
    if not adapted:
        return []
    name, ratio = max(adapted.items(), key=lambda item: float(np.max(np.abs(item[1]))))
    return [
        f"{len(adapted)} of {len(vectors)} parameters with a single axis are adapted, such as "
        f"{name!r} (ratio {float(np.max(ratio)):.3g}): biases and scales start at 0 or 1, so that "
        "their norms say little about their step. Leave them out with "
        "trust_ratio_mask=at_least_ndim(2)."
    ]


def _zero(params: Any) -> list[str]:
    norms = [float(from_sum_of_squares(sum_of_squares(leaf))) for leaf in jax.tree.leaves(params)]
    zero = [name for name, norm in zip(leaf_names(params), norms, strict=True) if norm == 0]
    if not zero:
        return []
    return [
        f"{len(zero)} of {len(norms)} parameters are zero, such as {zero[0]!r}: a zero has no "
        "trust ratio, and its next step is that of the optimizer without adaptation. That is as "
        "it should be at the start; later, look whether it gets a gradient."
    ]


def _at_a_bound(ratios: np.ndarray) -> list[str]:
    found = []
    finite = ratios[np.isfinite(ratios) & (ratios != 1)]
    ends = {"upper": finite.max(initial=-np.inf), "lower": finite.min(initial=np.inf)}
    for name, bound in ends.items():
        share = int(np.sum(finite == bound))
        if share >= 2:
            found.append(
                f"{share} of {ratios.size} trust ratios are exactly {bound:.4g}, as an {name} "
                "bound makes them: there the step no longer follows the size of the weights. "
                "Widen trust_ratio_bounds or param_norm_bounds, if that was not meant."
            )
    return found


def _exploded(by_name: dict[str, np.ndarray], ratios: np.ndarray) -> list[str]:
    adapted = ratios[np.isfinite(ratios) & (ratios != 1)]
    if adapted.size < 3:
        return []
    median = float(np.median(adapted))
    far = {
        name: float(extreme)
        for name, ratio in by_name.items()
        for extreme in (np.max(ratio), np.min(ratio))
        if extreme != 1 and not median / EXPLODED <= extreme <= median * EXPLODED
    }
    if not far:
        return []
    shown = ", ".join(f"{name!r} ({ratio:.3g})" for name, ratio in list(far.items())[:3])
    return [
        f"{len(far)} of {len(by_name)} parameters have a trust ratio far from the median "
        f"{median:.3g}: {shown}. A large one comes of updates that are small beside the weights, "
        "often an embedding with few gradients or a layer that no loss reaches; bound it with "
        "trust_ratio_bounds=(None, 10.0)."
    ]


def _nothing_decayed(mask: Mask, params: Any, stacks: Stacked) -> list[str]:
    if mask is None or any(resolve_mask("weight_decay_mask", mask, stacks.blocks(params))):
        return []
    return [
        "weight_decay_mask leaves out every parameter, so that nothing is decayed. Its True are "
        "the parameters that are decayed; turn it round with ~ if it is a rule."
    ]


def _left_out(state: Any) -> list[str]:
    found = []
    for _, skipped in optax.tree.get_all_with_path(state, "skipped"):
        if int(skipped):
            found.append(
                f"{int(skipped)} steps were left out because a gradient was not finite. A few at "
                "the start of a run with a loss scale are usual; more call for a lower learning "
                "rate or a longer warm-up."
            )
    return found
