"""What a leaf program asks for, without its arrays: its rounds."""

from collections.abc import Callable
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from optax_largebatch import norms
from optax_largebatch.engine.requests import (
    EachMatrix,
    Held,
    Kind,
    OnMatrices,
    Path,
    Request,
    Statistic,
)

ROOTS = ("norm", "rms")
"""The kinds of statistics that are roots of a sum of squares."""

MEANS = ("mean", "rms")
"""The kinds of statistics that are divided by the number of elements."""

RoundKind = Literal["own", "of all leaves", "matrices"]

Splits = Callable[[tuple[int, ...]], norms.Split]
"""How a leaf is split between devices, by the axes that are kept."""


class Asked(NamedTuple):
    """A statistic that is asked for, without its array."""

    kind: Kind
    kept: tuple[int, ...]
    held: Held
    split: norms.Split
    elements: int
    """The number of elements that a block has on this device."""


class Round(NamedTuple):
    """A request without its arrays; repeated statistics count once."""

    kind: RoundKind
    asked: tuple[Asked, ...] = ()
    on_matrices: OnMatrices | None = None
    asker: Path | None = None
    """Who asks for a norm of all leaves: it is of all leaves that the same transform works on."""
    turn: int = 0
    """How many such norms it has asked for before."""


def round_of(request: Request | EachMatrix, splits: Splits) -> Round:
    """A request, without its arrays."""
    if isinstance(request, EachMatrix):
        return Round(kind_of(request), on_matrices=request.without_arrays)

    def asked(x: Statistic) -> Asked:
        kept = x.kept or ()
        blocks = math.prod(norms.shape_of_blocks(x.array.shape, kept))
        split = norms.Split()
        if x.held != "replicated":
            split = splits(() if x.held == "partial" else kept)
        return Asked(x.kind, kept, x.held, split, max(x.array.size // max(blocks, 1), 1))

    asker = request.asker if request.is_global else None
    return Round(kind_of(request), tuple(map(asked, distinct(request))), asker=asker)


def term(statistic: Statistic) -> jax.Array:
    """The terms of a sum: the elements, or their squares for the root of a sum."""
    return jnp.square(statistic.array) if statistic.kind in ROOTS else statistic.array


def distinct(request: Request) -> list[Statistic]:
    """The statistics of a request, without repetitions."""
    return list({identity(x): x for x in request.statistics}.values())


def kind_of(request: Request | EachMatrix) -> RoundKind:
    """Whom a request is about: its own leaf, all leaves, or matrices."""
    if isinstance(request, EachMatrix):
        return "matrices"
    return "of all leaves" if request.is_global else "own"


def identity(statistic: Statistic) -> Any:
    """A key that equal statistics of a round share."""
    return id(statistic.array), *statistic[1:]
