"""The reference executor, which defines what a leaf transform means.

It runs each leaf program once, as written, and takes each statistic by itself. It is slow, needs
much memory and is easy to read. Every other way to run a transform must give the same numbers.
"""

import functools
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
    Run,
    Statistic,
)
from optax_largebatch.engine.to_optax import leaf_transform_of
from optax_largebatch.engine.transform import LeafTransform
from optax_largebatch.norms import accumulation_dtype, cast, other_axes, total
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
    leaf_transform = leaf_transform_of(transform)
    if leaf_transform is None:
        raise TypeError(f"reference() takes one made of leaf transforms; got {transform!r}.")
    update = functools.partial(_step, leaf_transform)
    return optax.GradientTransformation(transform.init, update)


def _step(
    transform: LeafTransform,
    updates: Any,
    state: Any,
    params: Any = None,
) -> tuple[Any, Any]:
    """One step: every program once, each as far as its next request, in turns."""
    leaves, gradients = gradients_of(updates, params)
    states = transform.split(state, leaves)
    scalars = transform.scalars(state)
    choices = transform.choose(leaves)
    programs: dict[int, LeafProgram] = {}
    dtypes: dict[int, Any] = {}
    for i, gradient in enumerate(gradients):
        if gradient is not None:
            dtypes[i] = accumulation_dtype(gradient.dtype, leaves.arrays[i].dtype)
            param = None if params is None else leaves.arrays[i]
            given = gradient, param, states[i], scalars
            update, param, its_state, its_scalars = _cast(given, dtypes[i])
            first = Run(is_first=True)
            at = Leaf(param, param, its_state, its_scalars, choices[i], (), first)
            programs[i] = transform.program(update, at)
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
                    if isinstance(request, EachMatrix):
                        array, *numbers = request.arrays(dtypes[i])
                        array = request.on.matrices.map(request.on.function, array, *numbers)
                    else:
                        array = cast(request.array, request.dtype or dtypes[i])
                    request = programs[i].send(cast(array, dtypes[i]))
                waiting[i] = request
            except StopIteration as end:
                update, states[i] = end.value
                gradients[i] = update.astype(leaves.arrays[i].dtype)
        # A norm of all leaves waits for leaves that have other requests before it. It is of the
        # leaves that the same transform works on.
        local = {i: request for i, request in waiting.items() if not request.is_global}
        answers = {i: [_answer(x) for x in request.statistics] for i, request in local.items()}
        if waiting and not local:
            first = min(request.path or () for request in waiting.values())
            arrays = {i: x.statistics[0].array for i, x in waiting.items() if x.path == first}
            squares = [jnp.sum(jnp.abs(x) ** 2) for x in arrays.values()]
            norm = jnp.sqrt(total(squares))
            answers = {i: [norm.astype(dtypes[i])] for i in arrays}
        waiting = {i: x for i, x in waiting.items() if i not in answers}
    return leaves.rebuild(gradients), transform.join(state, states, leaves)


def _answer(statistic: Statistic) -> jax.Array:
    """The norm, root mean square, sum or mean of every slice along the axes that are kept."""
    x, kind, kept, _ = statistic
    is_root = statistic.is_root
    terms = jnp.square(jnp.abs(x)) if is_root else x
    answer = jnp.sum(terms, axis=other_axes(x.ndim, kept or ()), keepdims=bool(kept))
    if kind in ("mean", "rms"):
        answer = answer * answer.size / max(x.size, 1)
    return jnp.sqrt(answer) if is_root else answer


def _cast(tree: Any, dtype: Any) -> Any:
    """Floating point and complex arrays, as precise as `dtype`. The engine has its own cast."""

    def of_array(x: Any) -> Any:
        array = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)
        return cast(x, dtype) if array else x

    return jax.tree.map(of_array, tree)
