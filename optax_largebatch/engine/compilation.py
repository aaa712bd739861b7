"""Requests to the compiler; they change the speed, and no number."""

from collections.abc import Callable, Hashable, Iterator, Mapping
import contextlib
from typing import Any, TypeVar

import jax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
import jax.numpy as jnp

from optax_largebatch import norms

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")
Tree = TypeVar("Tree")


def outlined() -> contextlib.AbstractContextManager[Any]:
    """Keeps XLA on a CPU from merging the jitted functions called here with what is around them.

    On an accelerator it would keep them from being compiled well, so it belongs in what is made
    for CPUs alone.
    """
    return set_xla_metadata(inlineable="false")


def merged_inside(function: Callable[..., Result]) -> Callable[..., Result]:
    """The same function, in which the compiler may merge all calls even inside `outlined`.

    Otherwise each `jnp.where` in it, which is a jitted function too, would be a call of its own.
    """
    return _merging()(function)


@contextlib.contextmanager
def _merging() -> Iterator[None]:
    with set_xla_metadata(inlineable=None):  # which itself is no decorator in jax 0.7
        yield


def barrier(arrays: Tree) -> Tree:
    """The same tree, in which no array is available before all are.

    Inside `jax.shard_map`, arrays that differ between devices wait separately; otherwise all would
    get a type that differs between devices.
    """
    own, structure = jax.tree.flatten(arrays)
    return structure.unflatten(_wait_apart(_wait, dict(enumerate(own))).values())


def together(arrays: Mapping[Key, jax.Array]) -> dict[Key, jax.Array]:
    """The same arrays, none of which is available before all are, as with `barrier`.

    So the compiler can combine the reductions that made them, whatever other work it finds in the
    meantime. It also compiles the work on each of them alike.
    """
    return _wait_apart(_wait_for_reductions, arrays)


def zeros_unless(
    needed: jax.Array, function: Callable[..., jax.Array], *arrays: jax.Array
) -> jax.Array:
    """The result of a function if it is needed, otherwise zeros.

    One CPU saves itself the work. Elsewhere the function is called in either case: a choice at run
    time makes a GPU wait for its host, and keeps sums from travelling together.
    """

    def chosen(needed: jax.Array, *arrays: jax.Array) -> jax.Array:
        return jax.lax.cond(needed, function, lambda *_: jnp.zeros(kind.shape, kind.dtype), *arrays)

    def masked(needed: jax.Array, *arrays: jax.Array) -> jax.Array:
        return jnp.where(needed, function(*arrays), 0)

    if norms.is_on_a_mesh(arrays):
        return masked(needed, *arrays)
    kind = jax.eval_shape(function, *arrays)
    return jax.lax.platform_dependent(needed, *arrays, cpu=chosen, default=masked)


def _wait_apart(wait: Callable[..., Any], arrays: Mapping[Key, jax.Array]) -> dict[Key, jax.Array]:
    """The same arrays, after those of one type have waited for each other."""
    result = dict(arrays)
    for varying in {norms.varying_axes(x) for x in arrays.values()}:
        alike = {key: x for key, x in arrays.items() if norms.varying_axes(x) == varying}
        result |= zip(alike, wait(*alike.values()), strict=True)
    return result


def _derivatives_do_not_wait(barrier: Callable[..., Any]) -> Callable[..., Any]:
    """Lets derivatives pass: an infinite one would meet the zeros of all others."""
    waiting = jax.custom_jvp(barrier)
    waiting.defjvp(lambda primals, tangents: (waiting(*primals), tangents))
    return waiting


def _plain(*arrays: jax.Array) -> Any:
    return jax.lax.optimization_barrier(arrays)


def _in_a_call(*arrays: jax.Array) -> Any:
    """XLA on a CPU drops a barrier before it combines reductions, but not one in a call."""
    with outlined():
        return jax.jit(_plain)(*arrays)


_barrier_p = Primitive("optax_largebatch_barrier")
_barrier_p.multiple_results = True
_barrier_p.def_abstract_eval(lambda *types: types)
_barrier_p.def_impl(_plain)
mlir.register_lowering(_barrier_p, mlir.lower_fun(_plain))
mlir.register_lowering(_barrier_p, mlir.lower_fun(_in_a_call), platform="cpu")
batching.primitive_batchers[_barrier_p] = lambda arrays, axes: (_barrier_p.bind(*arrays), axes)

_wait = _derivatives_do_not_wait(_plain)
# A call copies what goes through it: it is for numbers, and not for the arrays of `barrier`.
_wait_for_reductions = _derivatives_do_not_wait(lambda *arrays: tuple(_barrier_p.bind(*arrays)))
