"""Several transformations as one: in a chain, or as the sum of branches."""

from collections.abc import Callable, Sequence
import functools
import itertools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from optax_largebatch import engine
from optax_largebatch.arguments import check_state
from optax_largebatch.engine.recorded_states import record_state


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
    leaf_transforms = [engine.leaf_transform_of(transform) for transform in transforms]
    if all(leaf_transforms):
        return engine.transformation(chained([x for x in leaf_transforms if x]))
    segments: list[tuple[int, Any]] = []
    for ours, run in itertools.groupby(transforms, lambda x: bool(engine.leaf_transform_of(x))):
        links = list(run)
        segment = chain(*links) if ours else optax.chain(*links)
        segments.append((len(links), segment))

    foreign = [transform for transform in transforms if not engine.leaf_transform_of(transform)]

    def init(params: optax.Params) -> tuple[Any, ...]:
        for transform in foreign:  # so that `explain` can name it; there is no state to look for
            update: Any = transform.update
            record_state((), engine.LeafTransform(update), params)
        states = (segment.init(params) for _, segment in segments)
        return tuple(itertools.chain.from_iterable(states))

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, tuple[Any, ...]]:
        check_state("chain", (None,) * len(transforms), state)
        states = iter(state)
        new_states = []
        for size, segment in segments:
            old = tuple(itertools.islice(states, size))
            updates, new = segment.update(updates, old, params, **extra_args)
            new_states += new
        return updates, tuple(new_states)

    return optax.GradientTransformationExtraArgs(init, update)


def chained(transforms: Sequence[engine.LeafTransform]) -> engine.LeafTransform:
    """The transform that applies others in order; its state is the tuple of their states."""

    def leaf(update: jax.Array, at: engine.Leaf) -> engine.LeafProgram:
        new_states = []
        for transform, here in zip(transforms, _each(at), strict=True):
            update, new_state = yield from transform.program(update, here)
            new_states.append(new_state)
        return update, tuple(new_states)

    return _composed("chain", transforms, leaf)


def sum_of(*branches: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    r"""Gives the same gradient to several transformations and adds what they return.

    .. math:: u = \sum_i f_i(g)

    The norms that the branches need at one point are taken together.

    Args:
        *branches: the transformations :math:`f_i`, at least one, each a transformation of this
            library or a `chain` of them.

    Returns:
        A transformation; its state is the tuple of the branches' states.

    Raises:
        TypeError: a branch is not made of transformations of this library.
        ValueError: there is no branch.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import add_decayed_weights, chain, clip_by_value, sum_of
        >>> transform = sum_of(clip_by_value(1.0), chain(clip_by_value(2.0), clip_by_value(None)))
        >>> gradients = jnp.array([0.5, -3.0])
        >>> updates, _ = transform.update(gradients, transform.init(gradients))
        >>> print(updates)
        [ 1. -3.]
    """
    if not branches:
        raise ValueError("sum_of() needs at least one branch.")
    transforms = [leaf_transform(branch) for branch in branches]

    def leaf(update: jax.Array, at: engine.Leaf) -> engine.LeafProgram:
        branches = zip(transforms, _each(at), strict=True)
        programs = [branch.program(update, here) for branch, here in branches]
        results = yield from engine.in_parallel(*programs)
        updates, states = zip(*results, strict=True)
        return functools.reduce(jnp.add, updates), states

    return engine.transformation(_composed("sum_of", transforms, leaf))


def leaf_transform(
    transform: Any,
    name: str = "each branch of sum_of()",
) -> engine.LeafTransform:
    """The leaf transform of an argument that must be one transformation of this library."""
    known = isinstance(transform, optax.GradientTransformation)
    made_of = engine.leaf_transform_of(transform) if known else None
    if made_of is None:
        raise TypeError(
            f"{name} must be one transformation of this library or a chain of them, because their "
            f"norms are taken together; got {transform!r}."
        )
    return made_of


def _composed(
    how: str,
    transforms: Sequence[engine.LeafTransform],
    leaf: Callable[[jax.Array, engine.Leaf], engine.LeafProgram],
) -> engine.LeafTransform:
    """The transform whose leaf program runs the leaf programs of others.

    Its state, scalars and choices are tuples of the others'.

    Args:
        how: the name of the composition.
        transforms: the others.
        leaf: the leaf program.
    """
    names = ", ".join(x.name for x in transforms)
    return engine.LeafTransform(
        leaf,
        state=tuple(map(engine.StateOf, transforms)),
        scalars=lambda state: tuple(
            x.scalars(its_state) for x, its_state in zip(transforms, state, strict=True)
        ),
        choices=lambda leaves: list(zip(*(x.choose(leaves) for x in transforms), strict=True)),
        needs_params=any(x.needs_params for x in transforms),
        given=given_of(transforms),
        takes_complex=True,
        name=f"{how}({names})" if len(names) < 70 else f"{how}({names[:66]}...)",
    )


def _each(at: engine.Leaf) -> list[engine.Leaf]:
    """The `Leaf` of each of several transforms."""
    of_each = zip(at.state, at.scalars, at.choice, strict=True)
    return [
        at._replace(state=state, scalars=scalars, choice=choice, run=at.run.inside(position))
        for position, (state, scalars, choice) in enumerate(of_each)
    ]


def given_of(transforms: Sequence[engine.LeafTransform]) -> Literal["parts", "shards"]:
    """The `given` of a transform that runs others; those get whole leaves by themselves."""
    return "parts" if all(x.given == "parts" for x in transforms) else "shards"
