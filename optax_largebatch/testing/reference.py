"""The reference executor, which defines what a leaf transform means.

It runs each leaf program once, as written, and takes each statistic by itself. It is slow, needs
much memory and is easy to read. Every other way to run a transform must give the same numbers.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_largebatch.engine.requests import (
    EachMatrix,
    Hoist,
    Leaf,
    LeafProgram,
    Request,
    Statistic,
)
from optax_largebatch.engine.to_optax import leaf_transform_of
from optax_largebatch.engine.transform import LeafTransform
from optax_largebatch.norms import accumulation_dtype, total
from optax_largebatch.params.leaves import gradients_of


def reference(transform: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same transformation, run as its leaf programs are written.

    Args:
        transform: a transformation that is made of leaf transforms.

    Returns:
        A transformation with the same state and, but for rounding, the same updates.

    Raises:
        TypeError: the transformation, or a part of it, is not of this library.
    """
    own = leaf_transform_of(transform)
    if own is None:
        raise TypeError(f"reference() takes one made of leaf transforms; got {transform!r}.")

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return _step(own, updates, state, params)

    return optax.GradientTransformation(transform.init, update)


def _step(transform: LeafTransform, updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """One step: every program once, each as far as its next request, in turns."""
    leaves, gradients = gradients_of(updates, params)
    parts = transform.split(state, leaves)
    scalars, choices = transform.scalars(state), transform.choose(leaves)
    programs: dict[int, LeafProgram] = {}
    dtypes: dict[int, Any] = {}
    for i, gradient in enumerate(gradients):
        if gradient is not None:
            dtypes[i] = accumulation_dtype(gradient.dtype, leaves.arrays[i].dtype)
            given = (gradient, None if params is None else leaves.arrays[i], parts[i], scalars)
            first, param, own, numbers = _cast(given, dtypes[i])
            at = Leaf(param, param, own, numbers, choices[i], ())
            programs[i] = transform.program(first, at)
    answers: dict[int, Any] = dict.fromkeys(programs)
    waiting: dict[int, Request] = {}
    while answers:
        for i, answer in answers.items():
            try:
                request = programs[i].send(answer)
                while not isinstance(request, Request):
                    if isinstance(request, Hoist):
                        request = programs[i].send(list(request.values))
                        continue
                    x = request.array.astype(request.dtype or dtypes[i])
                    if isinstance(request, EachMatrix):
                        numbers = [jnp.asarray(own, x.dtype) for own in request.numbers]
                        x = request.matrices.map(request.function, x, *numbers)
                    request = programs[i].send(x.astype(dtypes[i]))
                waiting[i] = request
            except StopIteration as end:
                update, parts[i] = end.value
                gradients[i] = update.astype(leaves.arrays[i].dtype)
        # A norm of all leaves waits for those that ask for their own before it, and it is of the
        # leaves that the same transform works on.
        own = {i: x for i, x in waiting.items() if not x.is_global}
        answers = {i: [_answer(x) for x in one.statistics] for i, one in own.items()}
        if waiting and not own:
            first = min(x.asker or () for x in waiting.values())
            asking = {i: x for i, x in waiting.items() if x.asker == first}
            norm = jnp.sqrt(total([jnp.sum(x.statistics[0].array ** 2) for x in asking.values()]))
            answers = {i: [norm.astype(dtypes[i])] for i in asking}
        waiting = {i: x for i, x in waiting.items() if i not in answers}
    return leaves.rebuild(gradients), transform.join(state, parts, leaves, jnp.concatenate)


def _answer(asked: Statistic) -> jax.Array:
    """The norm, root mean square, sum or mean of every slice along the axes that are kept."""
    x = asked.array
    others = tuple(axis for axis in range(x.ndim) if axis not in (asked.kept or ()))
    whole = {"axis": others, "keepdims": True} if asked.kept else {}
    square = asked.kind in ("norm", "rms")
    total = jnp.sum(jnp.square(x) if square else x, **whole)
    if asked.kind in ("mean", "rms"):
        total = total * total.size / max(x.size, 1)
    return jnp.sqrt(total) if square else total


def _cast(tree: Any, dtype: Any) -> Any:
    """Floating point arrays in `dtype`."""

    def cast(x: Any) -> Any:
        array = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(dtype) if array else x

    return jax.tree.map(cast, tree)
