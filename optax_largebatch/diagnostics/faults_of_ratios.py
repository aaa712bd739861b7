"""Faults that trust ratios show: not finite, at a bound, far from the others."""

import inspect
from typing import NamedTuple

import numpy as np

from optax_largebatch.arguments import Bounds
from optax_largebatch.optimizers.lamb import lamb
from optax_largebatch.optimizers.lans import lans
from optax_largebatch.optimizers.lars import larc, lars
from optax_largebatch.optimizers.lbsgd import lbsgd
from optax_largebatch.params.owners import Part
from optax_largebatch.transforms.lars import ScaleByLarsState

EXPLODED = 100
"""`diagnose` reports a trust ratio that is this many times the median of all."""


class Ratio(NamedTuple):
    """The trust ratios of one parameter in one part of the state."""

    name: str
    number: int
    """The number of the parameter among the leaves."""
    values: np.ndarray
    norms: np.ndarray
    """The norms of the parameter's blocks."""
    bounds: Bounds
    """The bounds on a ratio."""
    options: frozenset[str]
    """The arguments of the optimizer that adapts the parameter."""

    def largest(self) -> float:
        """The largest trust ratio of an adapted block."""
        return float(np.max(self.values, where=self.values != 1, initial=-np.inf))

    def smallest(self) -> float:
        """The smallest trust ratio of an adapted block."""
        return float(np.min(self.values, where=self.values != 1, initial=np.inf))


def options_of(part: Part) -> frozenset[str]:
    """The arguments of the optimizer that has this part, as far as its state tells it."""
    if part.kind is ScaleByLarsState:
        candidates = [lars, larc, lbsgd]
    else:
        candidates = [
            lans if "momentum_branch" in part.keys or "gradient_branch" in part.keys else lamb
        ]
    return frozenset.intersection(*(frozenset(inspect.signature(x).parameters) for x in candidates))


def _all(ratios: list[Ratio]) -> np.ndarray:
    """The ratios of all blocks."""
    return np.concatenate([np.zeros(0), *(ratio.values.ravel() for ratio in ratios)])


def not_finite(ratios: list[Ratio]) -> list[str]:
    """Ratios that are not finite, or 0, which is what an infinite norm of the gradient makes."""
    bad = [one for one in ratios if not np.all(np.isfinite(one.values) & (one.values != 0))]
    if not bad:
        return []
    values = bad[0].values
    value = values[~np.isfinite(values) | (values == 0)].flat[0]
    return [
        f"{len(bad)} of {len(ratios)} parameters have a trust ratio that is not finite or 0, such "
        f"as {bad[0].name!r} ({value}): their weights or gradients are not finite, or a norm "
        "overflows. Go back to a checkpoint, and wrap the optimizer in skip_bad_steps."
    ]


def at_a_bound(ratios: list[Ratio]) -> list[str]:
    """Ratios at a bound of the optimizer."""
    at: dict[tuple[str, float], int] = {}
    for one in ratios:
        for end, bound in zip(("a lower", "an upper"), one.bounds or (None, None), strict=True):
            if bound is not None:
                is_at = (one.values == np.float32(bound)) & (one.norms > 0)
                key = (end, float(bound))
                at[key] = at.get(key, 0) + int(np.sum(is_at))
    return [
        f"{number} of {_all(ratios).size} trust ratios are at {end} bound, {bound:.4g}: there the "
        "step no longer follows the size of the weights. Widen the bound, if that was not meant."
        for (end, bound), number in at.items()
        if number
    ]


def exploded(ratios: list[Ratio]) -> list[str]:
    """Ratios that are far above or far below the median."""
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
