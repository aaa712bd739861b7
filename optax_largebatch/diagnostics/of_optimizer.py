"""What an optimizer says about its state, however it is wrapped."""

from collections.abc import Sequence
from typing import Any

import jax
import optax

from optax_largebatch.diagnostics.state_parts import About, Part, parts
from optax_largebatch.engine.recorded_states import RecordedState, recorded_states
from optax_largebatch.params.owners import Keys, owners
from optax_largebatch.params.paths import leaf_names
from optax_largebatch.params.stacked import Stacks, check_stacked
from optax_largebatch.transforms.declared_ratios import TrustRatios
from optax_largebatch.transforms.lars import ScaleByLarsState
from optax_largebatch.transforms.trust_ratio import ScaleByTrustRatioState

LAYER_WISE = (ScaleByTrustRatioState, ScaleByLarsState)
"""The parts of a state that hold trust ratios."""

Optimizer = optax.GradientTransformation | optax.MultiSteps


def optimizer_first(
    optimizer: Any, state: Any, params: Any, *, needs_params: bool = True
) -> tuple[Optimizer | None, Any, Any]:
    """The arguments of a reader that may be called without its first argument, the optimizer.

    Args:
        optimizer: what the reader was given as its first argument, or None; and so on.
        state: the second argument.
        params: the third argument.
        needs_params: whether the reader needs the parameters without an optimizer, too.

    Returns:
        The optimizer or None, the state, and the parameters.

    Raises:
        TypeError: the state or the parameters are missing, or the first of three is no optimizer.
    """
    is_optimizer = isinstance(optimizer, Optimizer)
    if optimizer is not None and not is_optimizer:
        if state is not None and params is not None:
            raise TypeError(
                "optimizer must be a gradient transformation, as in (optimizer, state, params); "
                f"got a {type(optimizer).__name__}."
            )
        optimizer, state, params = None, optimizer, params if state is None else state
    for name, value in {"state": state, "params": params}.items():
        if value is None and (name == "state" or needs_params or is_optimizer):
            raise TypeError(f"{name} must be given, as in (optimizer, state, params); got None.")
    return optimizer, state, params


def layer_wise_parts(
    optimizer: Optimizer | None, state: Any, params: Any, stacked: Stacks
) -> list[Part]:
    """The parts of a state that hold trust ratios, with what the optimizer says about them.

    Args:
        optimizer: the optimizer, or None if it is not known.
        state: its state.
        params: the parameters; not needed without an optimizer.
        stacked: the stacks that the caller believes in, or None.

    Raises:
        ValueError: the state is not that of the optimizer, or the optimizer has other stacks.
    """
    found = parts(state, *LAYER_WISE)
    if optimizer is None:
        return found
    told = _told(optimizer, params, stacked)
    # The state may be inside another object, such as a `TrainState`, which adds its keys.
    above = min(map(len, _keys(found)), default=0) - min(map(len, told), default=0)
    heads = {keys[: max(above, 0)] for keys in _keys(found)}
    if above < 0 or len(heads) > 1 or {keys[above:] for keys in _keys(found)} != set(told):
        raise ValueError(
            f"state must be that of the optimizer, which has {_places(list(told))}; got a "
            f"{type(state).__name__} with {_places(_keys(found))}. Pass the state that this "
            "optimizer's `init` or `update` returned."
        )
    return [part._replace(about=told[part.keys[above:]]) for part in found]


def _told(optimizer: Optimizer, params: Any, stacked: Stacks) -> dict[Keys, About | None]:
    """What the optimizer says about each part of its state with trust ratios, by the part's keys.

    It is None for a part whose transform makes its state out of our sight, as inside `jax.jit`.
    """
    told: dict[Keys, About | None] = {}

    def look(params: Any) -> None:
        with recorded_states() as record:
            state = optimizer.init(params)
        for part in parts(state, *LAYER_WISE):
            ratios = part.array("trust_ratios")
            made = [x for x in record if isinstance(x.state, LAYER_WISE)]
            own = next((x for x in made if x.state.trust_ratios is ratios), None)
            told[part.keys] = None if own is None else _about(own, params, stacked)

    jax.eval_shape(look, params)
    return told


def _about(made: RecordedState, params: Any, stacked: Stacks) -> About | None:
    """What the declaration of a state says; None if the transform sees other parameters."""
    declared = made.declaration.trust_ratios
    if not isinstance(declared, TrustRatios):  # somebody's own transform keeps such a state
        return None
    numbers = owners(made.params, params)
    seen, leaves = jax.tree.leaves(made.params), jax.tree.leaves(params)
    known = [number for number in numbers if number is not None]
    if len(known) < len(seen) or any(
        own.shape != leaves[number].shape for own, number in zip(seen, known, strict=True)
    ):
        return None
    axes = check_stacked(declared.stacked).axes(made.params)
    if stacked is not None:
        _check_same(leaf_names(made.params), check_stacked(stacked).axes(made.params), axes)
    return About(known, axes, declared.adapted(made.params), declared.bounds)


def _check_same(names: list[str], given: Sequence[Any], own: Sequence[Any]) -> None:
    for name, said, has in zip(names, given, own, strict=True):
        if said != has:
            raise ValueError(
                f"stacked must be that of the optimizer: it gives {name!r} the stacked axes "
                f"{said}, and the optimizer has {has}. Leave it out: the optimizer knows its own."
            )


def _keys(found: Sequence[Part]) -> list[Keys]:
    return [part.keys for part in found]


def _places(keys: Sequence[Keys]) -> str:
    """Places of trust ratios, for the message."""
    return f"trust ratios at {', '.join(map('/'.join, keys))}" if keys else "no trust ratios"
