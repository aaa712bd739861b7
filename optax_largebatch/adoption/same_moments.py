"""Whether the moments of two optimizers mean the same, found by running both."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np

from optax_largebatch.adoption.hidden import columns
from optax_largebatch.adoption.parts import BUFFERS, MACRO_BATCHES, MEANS, parts
from optax_largebatch.params.leaves import leaves_of
from optax_largebatch.params.paths import is_hidden, leaf_names
from optax_largebatch.wrappers.loss_scale import DynamicLossScaleState

_STEPS = 3
"""Enough for a warm-up to leave 0, and for the moments of Yogi to leave those of Adam."""
_LONGEST_AXIS = 2


class _Place(NamedTuple):
    """One moment of one parameter."""

    step: int
    field: str
    name: str


def check_same_moments(old_optimizer: Any, optimizer: Any, params: Any, state: Any) -> None:
    """Checks that two optimizers keep the same moments of the same gradients.

    Both take some steps from their begin. The parameters have the tree of `params` and as many
    axes, but they are short, and float32 so that small differences are seen.

    Raises:
        ValueError: `state` is not that of `old_optimizer`, the moments differ, an optimizer cannot
            take a step, or this is inside `jax.jit`.
    """
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((params, state))):
        raise ValueError(
            "old_optimizer must be left out inside jax.jit and jax.vmap, where no moments can be "
            "compared. To have them compared, call adopt_state outside."
        )
    rng = np.random.default_rng(0)

    def like(leaf: Any) -> jax.Array:
        shape = [min(size, _LONGEST_AXIS) for size in np.shape(leaf)]
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        short = jax.tree.map(like, params)
        # Long enough to be clipped where that is done.
        gradients = [jax.tree.map(lambda x: 3 * like(x), short) for _ in range(_STEPS)]
        old = dict(_moments("old_optimizer", old_optimizer, short, gradients, state))
        new = dict(_moments("optimizer", optimizer, short, gradients))
    for place in sorted(old.keys() & new.keys()):
        ours, theirs = new[place], old[place]
        error = np.abs(ours - theirs)
        if not error.max(initial=0) <= _tolerance(ours, theirs) * np.abs(theirs).max(initial=0):
            at = np.unravel_index(error.argmax(), error.shape)
            raise ValueError(
                "old_optimizer must keep the moments that optimizer keeps: in step "
                f"{place.step} with the same gradients, an element of {place.field} of "
                f"{place.name!r} is {theirs[at]:.4g} in old_optimizer and {ours[at]:.4g} in "
                "optimizer. Give both the same b1, b2 or momentum (of Muon: beta), and the same "
                "clipping and decay before the moments. Where that cannot be, as with "
                "optax.adamax, adamaxw, yogi and contrib.adopt, begin with "
                "optimizer.init(params). Leave old_optimizer out to take the moments as they are."
            )


def _moments(
    who: str, optimizer: Any, params: Any, gradients: list[Any], like: Any = None
) -> Iterator[tuple[_Place, np.ndarray]]:
    """The moments of an optimizer after each of its first steps.

    Args:
        who: the optimizer, for messages.
        optimizer: it.
        params: the parameters, which stay as they are.
        gradients: those of each step.
        like: a state of the optimizer, to check that it is one.
    """
    leaves, names = leaves_of("params", params), leaf_names(params)
    state = optimizer.init(params)
    if like is not None and _kinds(state) != _kinds(like):
        raise ValueError(
            f"{who} must be the optimizer that state is of: it keeps {_listed(state)}, and state "
            f"has {_listed(like)}."
        )
    update = jax.jit(lambda *arguments: optimizer.update(*arguments)[1])
    for step, gradient in enumerate(gradients, 1):
        state = _after_a_step(who, update, gradient, state, params)
        for part in parts(state):
            fields = part._fields if isinstance(part, (*MEANS, *BUFFERS)) else ()
            for field in set(fields) & {"mu", "nu", "trace"}:
                moments = columns(leaves, f"the {field} of {who}", getattr(part, field))
                for name, moment in zip(names, moments, strict=True):
                    if not is_hidden(moment):
                        yield _Place(step, field, name), np.asarray(moment)


def _after_a_step(who: str, update: Any, gradient: Any, state: Any, params: Any) -> Any:
    """The state after a step, with the same gradient for all parts of a macro-batch."""
    before = 0
    while True:
        scales = [one.loss_scale for one in parts(state) if isinstance(one, DynamicLossScaleState)]
        scaled = jax.tree.map(lambda x, scales=scales: x * np.prod(scales), gradient)
        try:
            state = update(scaled, state, params)
        except Exception as error:  # an optimizer of anybody's, which may want more arguments
            raise ValueError(_no_step(who, error)) from error
        macro_batches = [one for one in parts(state) if isinstance(one, MACRO_BATCHES)]
        held = sum(int(jnp.asarray(one.mini_step)) for one in macro_batches)
        if not held:
            return state
        if held <= before:
            raise ValueError(_no_step(who, "it leaves a micro-batch out."))
        before = held


def _no_step(who: str, why: Any) -> str:
    return (
        f"{who} could not take a step with gradients and parameters alone: {why} Leave "
        "old_optimizer out, and compare the settings of the two optimizers yourself."
    )


def _tolerance(*arrays: np.ndarray) -> float:
    """The relative error that rounding explains."""
    return max(1e-4, *(8 * float(jnp.finfo(array.dtype).eps) for array in arrays))


def _kinds(state: Any) -> Counter[str]:
    """The types of the parts of a state. Their order may change: `jax.jit` sorts dictionaries."""
    return Counter(type(part).__name__ for part in parts(state))


def _listed(state: Any) -> str:
    return ", ".join(_kinds(state).elements()) or "nothing"
