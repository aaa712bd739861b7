"""Composition of transformations."""

from collections.abc import Callable, Sequence
import itertools
from typing import Any

import jax
import optax

from optax_largebatch.arguments import check_state
from optax_largebatch.engine.requests import Leaf, LeafProgram
from optax_largebatch.engine.to_optax import leaf_transform_of, transformation
from optax_largebatch.engine.transform import LeafTransform
from optax_largebatch.transforms.several import each_at, several


def chain(*transforms: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    r"""Applies transformations one after the other, as `optax.chain` does.

    Neighbours from this library run together: between them the update stays in the accumulation
    dtype (float32, or float64 for float64 parameters), and norms that several of them need at one
    point are taken in one reduction. Other transformations of optax may stand anywhere between
    them.

    Args:
        *transforms: the transformations, in the order in which they act on the gradient; at
            least one.

    Returns:
        A transformation; its state is the tuple of the transformations' states. Like every
        transformation of this library, its `update` takes the extra argument `partition_specs`: how
        the parameters are split, as a tree of `PartitionSpec` or `NamedSharding` or a prefix of
        one. Inside `jax.shard_map` and `jax.pmap` it is needed where the array types do not tell;
        under `jit`, devices then exchange the norms of all parameters as one vector.

    Raises:
        TypeError: an argument is no gradient transformation.
        ValueError: there is none.

    Examples:
        >>> import optax
        >>> from optax_largebatch import chain, scale_by_adam, scale_by_trust_ratio
        >>> optimizer = chain(
        ...     optax.clip_by_global_norm(1.0), scale_by_adam(), scale_by_trust_ratio(),
        ...     optax.scale(-1e-3),
        ... )
    """
    if not transforms:
        raise ValueError("chain() needs at least one transformation.")
    for transform in transforms:
        if not isinstance(transform, optax.GradientTransformation):
            raise TypeError(
                "chain() takes gradient transformations as separate arguments; "
                f"got {transform!r} of type {type(transform).__name__}."
            )
    own = [leaf_transform_of(transform) for transform in transforms]
    if all(own):
        return transformation(chained([x for x in own if x]))
    runs = [
        (list(run), ours)
        for ours, run in itertools.groupby(transforms, key=lambda x: bool(leaf_transform_of(x)))
    ]
    segments = [chain(*run) if ours else optax.chain(*run) for run, ours in runs]
    sizes = [len(run) for run, _ in runs]
    inits: list[Callable[[optax.Params], Any]] = [segment.init for segment in segments]
    steps: list[Callable[..., Any]] = [segment.update for segment in segments]

    def init(params: optax.Params) -> tuple[Any, ...]:
        return tuple(itertools.chain.from_iterable(states(params) for states in inits))

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, tuple[Any, ...]]:
        check_state("chain", (None,) * len(transforms), state)
        rest = list(state)
        new_state: list[Any] = []
        for step, size in zip(steps, sizes, strict=True):
            own, rest = tuple(rest[:size]), rest[size:]
            updates, own = step(updates, own, params, **extra_args)
            new_state.extend(own)
        return updates, tuple(new_state)

    return optax.GradientTransformationExtraArgs(init, update)


def chained(transforms: Sequence[LeafTransform]) -> LeafTransform:
    """The transform that applies others in order; its state is the tuple of their states."""

    def leaf(update: jax.Array, at: Leaf) -> LeafProgram:
        new_states = []
        for transform, here in zip(transforms, each_at(at), strict=True):
            update, new_state = yield from transform.program(update, here)
            new_states.append(new_state)
        return update, tuple(new_states)

    return several("chain", transforms, leaf)
