"""Checks of a transform when it is built, and of its leaf program when it first runs.

Each message names the transform, what it did, and the cure.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from optax_largebatch import norms
from optax_largebatch.engine.blocks import NumberPerBlock, VectorOfBlocks
from optax_largebatch.engine.requests import Leaf
from optax_largebatch.engine.state import Counter, Field, PerParameter, names_and_fields

KINDS = (
    "Counter() counts the steps, PerParameter() is one array for each parameter, "
    "NumberPerBlock() and VectorOfBlocks() hold one number for each block, "
    "PerAxis(initial) arrays for the axes of a parameter, Shared(initial) what is the same for all "
    "leaves, StateOf(transform) the state of another transform"
)


def check_declaration(transform: Any) -> None:
    """Checks a transform when it is built.

    Raises:
        TypeError: the leaf program is no function, or a field of the state is no `Field`.
        ValueError: `given` is none of the three words, or does not go with the state.
    """
    who = transform.name
    if not callable(transform.leaf):
        raise TypeError(f"{who}: leaf must be a function of (update, at), got {transform.leaf!r}.")
    if not isinstance(transform.state, tuple):
        raise TypeError(
            f"{who}: state must be the state's NamedTuple with a field's kind in the place of each "
            f"array, or optax.EmptyState(); got {transform.state!r}. {KINDS}."
        )
    for name, field in names_and_fields(transform.state):
        if not isinstance(field, Field):
            raise TypeError(
                f"{who}: the state's field {name!r} must say what it is, got {field!r}. {KINDS}."
            )
        if transform.given == "whole" and isinstance(field, NumberPerBlock):
            raise ValueError(
                f"{who}: the state's field {name!r} has one number for each block, which goes with "
                "given='parts' or 'shards'. Keep them in VectorOfBlocks(), or say "
                "given='parts' if the leaf program works on single elements."
            )
    if transform.given not in ("whole", "parts", "shards"):
        raise ValueError(
            f"{who}: given must be 'whole', 'parts' or 'shards', got {transform.given!r}."
        )


def no_request(transform: Any, yielded: Any) -> TypeError:
    """The error about a leaf program that has yielded something else than a request."""
    return TypeError(
        f"{transform.name}: a leaf program yields requests, such as block_norms(...) and "
        f"materialize(...), got {yielded!r} of type {type(yielded).__name__}."
    )


def check_result(
    transform: Any,
    result: Any,
    update: jax.Array,
    at: Leaf,
) -> None:
    """Checks what a leaf program has returned.

    Raises:
        TypeError: the result is no pair of an update and a state of the declared type.
        ValueError: the update or a part of the state has another shape, or a counter was changed.
    """
    who = transform.name
    if not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(
            f"{who}: the leaf program must return the update and the leaf's new state, "
            f"`return update, at.state._replace(...)`; got {type(result).__name__}."
        )
    new, state = result
    if jnp.shape(new) != update.shape:
        raise ValueError(
            f"{who}: the update must keep its shape {update.shape}; the leaf program returned one "
            f"of shape {jnp.shape(new)}."
        )
    if type(state) is not type(at.state):
        raise TypeError(
            f"{who}: the leaf program must return the state it was given with new values, "
            f"`at.state._replace(...)`; got {type(state).__name__} in place of "
            f"{type(at.state).__name__}."
        )
    blocks = math.prod(norms.shape_of_blocks(update.shape, at.stacked))
    for field, old, now in zip(transform.state, at.state, state, strict=True):
        if isinstance(field, Counter) and now is not old:
            raise ValueError(
                f"{who}: the engine counts the steps; the leaf program must leave the state's "
                f"{field.name!r} as it is."
            )
        if now is None:  # a vector that is left as it was
            continue
        if isinstance(field, VectorOfBlocks) and jnp.size(now) not in (1, blocks):
            raise ValueError(
                f"{who}: the state's {field.name!r} takes one number for each block of a leaf; the "
                f"leaf program returned an array of shape {jnp.shape(now)}."
            )
        if isinstance(field, PerParameter | NumberPerBlock) and jnp.shape(now) != jnp.shape(old):
            raise ValueError(
                f"{who}: the state's {field.name!r} must keep its shape {jnp.shape(old)}; the leaf "
                f"program returned one of shape {jnp.shape(now)}."
            )
