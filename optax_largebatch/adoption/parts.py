"""The parts of a state that another optimizer can take over."""

from collections.abc import Iterator
from typing import Any

import optax

from optax_largebatch.transforms.adam import ScaleByAdamState
from optax_largebatch.transforms.momentum import AccumulateMomentumState
from optax_largebatch.transforms.orthogonalization.orthogonalized_momentum import (
    OrthogonalizeMomentumState,
)
from optax_largebatch.wrappers.accumulation import AccumulateGradientsState

MOMENTS = (ScaleByAdamState, optax.ScaleByAdamState)
MUON = (OrthogonalizeMomentumState, optax.contrib.MuonState)
MEANS = (*MOMENTS, *MUON)
"""States whose `mu` is a mean of gradients."""
BUFFERS = (AccumulateMomentumState, optax.TraceState)
MACRO_BATCHES = (AccumulateGradientsState, optax.MultiStepsState)

LIKE_PARAMETERS = ("mu", "nu", "trace", "accumulator", "acc_grads", "master", "radii")
"""Fields that hold a tree like the parameters, whose nodes are no states."""


def parts(node: Any) -> Iterator[Any]:
    """The NamedTuples of a state, the outer ones first.

    Raises:
        ValueError: a dictionary stands in the place of a NamedTuple with moments.
    """
    if isinstance(node, dict):
        _check_not_restored_as(node)
        below = list(node.values())
    elif isinstance(node, tuple | list):
        fields = getattr(node, "_fields", None)
        if fields is not None:
            yield node
        names = fields or [""] * len(node)
        below = [x for name, x in zip(names, node, strict=True) if name not in LIKE_PARAMETERS]
    else:
        return
    for part in below:
        yield from parts(part)


def counters(part: Any) -> dict[str, Any]:
    """The numbers of steps and micro-batches in a NamedTuple of a state."""
    if isinstance(part, MACRO_BATCHES):
        return {"mini_step": part.mini_step, "gradient_step": part.gradient_step}
    return {"count": part.count} if "count" in part._fields else {}


def _check_not_restored_as(node: dict[Any, Any]) -> None:
    """Raises on the dictionary that a checkpoint makes of a NamedTuple."""
    of_states = any(hasattr(part, "_fields") for part in node.values())  # as in optax.named_chain
    for kind in (*MEANS, *BUFFERS, *MACRO_BATCHES):
        if not of_states and set(node) == set(kind._fields):
            raise ValueError(
                "state must hold NamedTuples, and holds a dictionary of "
                f"{', '.join(kind._fields)}: it was read from a checkpoint without its types. "
                "Restore the checkpoint into the state that `init` of the old optimizer returns."
            )
