"""Matrices that a device has whole: how many of them are multiplied at a time.

A product of small matrices does not fill a GPU. So matrices of one shape, the layers of stacks and,
if the plan says so, those of several leaves, are multiplied as one batch.
"""

from collections.abc import Callable
import math
from typing import Any

import jax
import jax.numpy as jnp

from optax_largebatch.engine.identical_leaves import group_leaves
from optax_largebatch.engine.requests import EachMatrix, MatrixFunction, Tasks

ELEMENTS_AT_A_TIME = 2**22
"""The elements of products of matrices that fill a device: seven of 768 x 768."""


def tasks_by(common: Callable[[EachMatrix], Any], tasks: Tasks) -> dict[Any, Tasks]:
    """The tasks in groups, by what those of a group have in common."""
    groups: dict[Any, Any] = {}
    for key, task in tasks.items():
        groups.setdefault(common(task), {})[key] = task
    return groups


def multiplied_together(tasks: Tasks, side_by_side: bool) -> list[Tasks]:
    """Arrays whose matrices have one shape, in groups whose products fill a device.

    A tall matrix and a wide one with its sides are not together: XLA would transpose whole arrays.
    Without `side_by_side` each array is a group.
    """
    if not side_by_side:
        return [{key: task} for key, task in tasks.items()]
    groups: list[list[Any]] = []
    for alike in tasks_by(lambda task: task.on.matrices.shape, tasks).values():
        sizes = {key: size_of_product(task.array, task.on) for key, task in alike.items()}
        groups += group_leaves(sizes, ELEMENTS_AT_A_TIME)
    return [{key: tasks[key] for key in keys} for keys in groups]


def size_of_product(x: jax.Array, on: MatrixFunction) -> int:
    """The elements of the products of the matrices of an array with their transposes."""
    height, width = sorted(on.matrices.shape)
    return x.size * height // max(width, 1)


def multiplied(tasks: Tasks) -> jax.Array:
    """The results for all matrices of arrays that this device has whole: of one shape, a batch."""
    first = next(iter(tasks.values()))
    matrices = jnp.concatenate([task.to_batch() for task in tasks.values()])
    return map_matrices(first.apply, matrices, min(first.on.matrices.shape) ** 2)


def taken_apart(tasks: Tasks, matrices: jax.Array) -> dict[Any, jax.Array]:
    """The result for each array, from those for all matrices."""
    results = {}
    start = 0
    for key, task in tasks.items():
        stop = start + task.array.size // math.prod(task.on.matrices.shape)
        results[key] = task.from_batch(matrices[start:stop])
        start = stop
    return results


def map_matrices(
    function: Callable[[jax.Array], jax.Array],
    matrices: jax.Array,
    size: int,
) -> jax.Array:
    """A function of each matrix, on as many at a time as fill a device.

    Each result is written over its matrix, which saves memory.

    Args:
        function: takes a matrix to one of the same shape.
        matrices: say, (layers=12, rows=768, columns=3072).
        size: the elements that a matrix counts for.
    """
    count = len(matrices)
    at_a_time = max(ELEMENTS_AT_A_TIME // size, 1)
    of_several = jax.vmap(function)
    if count <= at_a_time:
        return function(matrices[0])[None] if count == 1 else of_several(matrices)
    whole = count // at_a_time

    def step(index: Any, matrices: jax.Array) -> jax.Array:
        start = index * at_a_time
        some = jax.lax.dynamic_slice_in_dim(matrices, start, at_a_time)
        return jax.lax.dynamic_update_slice_in_dim(matrices, of_several(some), start, 0)

    matrices = jax.lax.fori_loop(0, whole, step, matrices)
    start = whole * at_a_time
    if start == count:
        return matrices
    return matrices.at[start:].set(of_several(matrices[start:]))
