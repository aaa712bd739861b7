"""Checks of what `adopt_state` is given."""

from typing import Any

import jax
import jax.numpy as jnp

from optax_largebatch.adoption.moments import Moments
from optax_largebatch.adoption.parts import BUFFERS, MEANS, MUON, counters
from optax_largebatch.params.leaves import Leaves
from optax_largebatch.transforms.nesterov import NesterovSplitState


def check_optimizer(name: str, optimizer: Any) -> None:
    """Checks that an argument is an optimizer; `optax.MultiSteps` is one, too."""
    if not (callable(getattr(optimizer, "init", None)) and hasattr(optimizer, "update")):
        raise TypeError(
            f"{name} must be a gradient transformation, got {optimizer!r}. Pass an optimizer, such "
            "as lamb(1e-3)."
        )


def check_state(state: Any) -> None:
    """Checks that `state` can be the state of an optimizer."""
    if not isinstance(state, tuple | list | dict):
        raise TypeError(
            "state must be the state of an optimizer, as its `update` returns it; got a "
            f"{type(state).__name__}. A TrainState or an nnx.Optimizer has it as its opt_state."
        )
    if any(map(_is_box_of_nnx, jax.tree.leaves(state, is_leaf=_is_box_of_nnx))):
        raise TypeError(
            "state must hold arrays, and holds the variables of an nnx.Optimizer. Pass "
            "nnx.as_pure(optimizer.opt_state), and as params nnx.as_pure(nnx.state(model, "
            "nnx.Param)); as_pure is called pure in older versions of Flax."
        )


def _is_box_of_nnx(node: Any) -> bool:
    """Whether a node is a variable that only an `nnx.Optimizer` makes."""
    return any(
        base.__name__ == "OptState" and base.__module__.startswith("flax.nnx")
        for base in type(node).__mro__
    )


def check_one_model(old: list[Any]) -> None:
    """Checks that no counter has an axis for several models."""
    for part in old:
        for name, value in counters(part).items():
            if jnp.ndim(value):
                raise ValueError(
                    f"state must be that of one model: the {name} of its {type(part).__name__} has "
                    f"the shape {jnp.shape(value)}, with an axis for the copies of jax.pmap or the "
                    "models of jax.vmap. Of copies, pass one, as in jax.tree.map(lambda x: x[0], "
                    "(params, state)), and copy the new state again. For several models, map "
                    "adopt_state over them by jax.vmap, and give step."
                )


def check_same_kinds(leaves: Leaves, old: list[Any], new: list[Any]) -> None:
    """Checks that the old state has the kinds of moments that the new one needs, and no others.

    Moments may lie in several parts, if each parameter has its own in one of them.
    """
    twice = any(
        Moments(f"the moments {where}", leaves, own).has_twice
        for where, own in (("in state", old), ("of optimizer", new))
    )
    of_muon = any(isinstance(part, MUON) for part in (*old, *new))
    means = "moments of Adam or Muon" if of_muon else "moments of Adam"
    for kinds, what in ((MEANS, means), (BUFFERS, "a momentum buffer")):
        has, wants = (sum(isinstance(part, kinds) for part in own) for own in (old, new))
        once = not twice if kinds is MEANS else max(has, wants) <= 1
        if not once or bool(has) != bool(wants):
            raise ValueError(
                f"state must hold what optimizer needs, once: state has {what} {has} times, "
                f"and optimizer has {what} {wants} times. optimizer.init(params) begins "
                "without the gradients so far."
            )
    if any(isinstance(part, NesterovSplitState) for part in old):
        raise ValueError(
            "state has a NesterovSplitState, as that of lans, whose moments may be those of "
            "normalised gradients. Begin with optimizer.init(params)."
        )
