"""The sum of transformations of the same gradient."""

import functools

import jax
import jax.numpy as jnp
import optax

from optax_largebatch.engine.requests import Leaf, LeafProgram, in_parallel
from optax_largebatch.engine.to_optax import leaf_transform_of, transformation
from optax_largebatch.transforms.several import each_at, several


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
    transforms = []
    for branch in branches:
        known = isinstance(branch, optax.GradientTransformation)
        own = leaf_transform_of(branch) if known else None
        if own is None:
            raise TypeError(
                "each branch of sum_of() must be one transformation of this library or a chain of "
                f"them, because the branches share their statistics; got {branch!r}."
            )
        transforms.append(own)

    def leaf(update: jax.Array, at: Leaf) -> LeafProgram:
        columns = zip(transforms, each_at(at), strict=True)
        programs = [transform.program(update, here) for transform, here in columns]
        results = yield from in_parallel(*programs)
        updates, states = zip(*results, strict=True)
        return functools.reduce(jnp.add, updates), tuple(states)

    return transformation(several("sum_of", transforms, leaf))
