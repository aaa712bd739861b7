"""Several transforms as one, for chains and sums of branches."""

from collections.abc import Callable, Sequence
from typing import Literal

import jax

from optax_largebatch.engine.requests import Leaf, LeafProgram
from optax_largebatch.engine.state import StateOf
from optax_largebatch.engine.transform import LeafTransform


def several(
    how: str,
    transforms: Sequence[LeafTransform],
    leaf: Callable[[jax.Array, Leaf], LeafProgram],
) -> LeafTransform:
    """The transform whose leaf program runs the leaf programs of others.

    Its state, scalars and choices are tuples of the others'.

    Args:
        how: the name of the composition.
        transforms: the others.
        leaf: the leaf program.
    """
    names = ", ".join(x.name for x in transforms)
    return LeafTransform(
        leaf,
        state=tuple(map(StateOf, transforms)),
        scalars=lambda state: tuple(
            x.scalars(own) for x, own in zip(transforms, state, strict=True)
        ),
        choices=lambda leaves: list(zip(*(x.choose(leaves) for x in transforms), strict=True)),
        needs_params=any(x.needs_params for x in transforms),
        given=given_of(transforms),
        name=f"{how}({names})" if len(names) < 70 else f"{how}({names[:66]}...)",
    )


def each_at(at: Leaf) -> list[Leaf]:
    """The `Leaf` of each of several transforms."""
    columns = enumerate(zip(at.state, at.scalars, at.choice, strict=True))
    return [
        at._replace(state=state, scalars=scalars, choice=choice, path=(*at.path, number))
        for number, (state, scalars, choice) in columns
    ]


def given_of(transforms: Sequence[LeafTransform]) -> Literal["parts", "shards"]:
    """The `given` of a transform that runs others; those get whole leaves by themselves."""
    return "parts" if all(x.given == "parts" for x in transforms) else "shards"
