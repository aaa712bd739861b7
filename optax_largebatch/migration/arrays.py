"""Numbers and arrays that may be traced, on the host, or on any devices."""

from collections.abc import Iterable
from typing import Any

import jax
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np


def are_traced(*tree: Any) -> bool:
    """Whether some arrays are not known yet, as inside `jax.jit` and `jax.vmap`."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


def known(*numbers: Any) -> list[int] | None:
    """The numbers in order, each once; None if they are traced."""
    return None if are_traced(numbers) else sorted({int(x) for x in jax.device_get(numbers)})


def placed(value: Any, like: Any) -> jax.Array:
    """A value with the dtype of another array, and on its devices."""
    dtype = jnp.result_type(like)
    if are_traced(value, like):
        return jnp.asarray(value, dtype)
    if not isinstance(value, jax.Array):
        value = np.asarray(value, dtype)
    return jnp.asarray(jax.device_put(value, getattr(like, "sharding", None)), dtype)


def cast(value: Any, like: Any) -> jax.Array:
    """A value with the dtype of another array. It stays where it is, if it is on a device."""
    if isinstance(value, jax.Array):
        return jnp.asarray(value, jnp.result_type(like))
    return placed(value, like)


def fetched(tree: Any, like: jax.Array) -> Any:
    """The arrays of a tree on the host, unless they are traced.

    XLA would compile what is done to each of hundreds of small arrays, which takes minutes.

    Args:
        tree: the arrays, which may be split between devices.
        like: an array that every device has whole.
    """
    return tree if are_traced(tree, like) else jax.device_get(jax.device_put(tree, like.sharding))


def joined(arrays: Iterable[Any], like: jax.Array) -> jax.Array:
    """One vector of all elements of fetched arrays, with the dtype and the devices of another."""
    flat = [x.reshape(-1) for x in arrays]
    numpy: Any = jnp if are_traced(flat) else np
    return placed(numpy.concatenate(flat), like) if flat else like
