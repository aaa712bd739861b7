"""How a step is compiled; it changes the speed, and no number. All that is used of JAX's insides.

A program may be compiled ahead of time for a TPU on a CPU host, exported for three platforms at
once, or run on one of eight devices. What is known when it is traced are the types of its arrays.
The platform and the number of devices are known when it is lowered. So a step that may run on one
device is a primitive of its own, with a lowering for each platform, and so is a barrier that XLA on
a CPU would drop. README.md lists what breaks if a name from JAX's insides goes.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
import contextlib
import functools
from typing import Any, TypeVar

import jax
from jax.core import ShapedArray, Tracer
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir, partial_eval

from optax_largebatch import norms

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")
Tree = TypeVar("Tree")

Way = Callable[..., list[jax.Array]]
"""A step as it runs in one place, from arrays to arrays."""


def by_place(ways: Callable[[str | None], Way], types: Sequence[Any], *arrays: Any) -> list[Any]:
    """The result of a step, computed in the way that suits the place where it runs.

    Args:
        ways: the way for one device of a platform ("cpu", "cuda", "rocm", "tpu"), or, for None, the
            way for any number of devices. It closes over no traced array.
        types: arrays with the shapes and dtypes of the results.
        *arrays: the arguments of the way.
    """
    results = tuple(ShapedArray(x.shape, x.dtype) for x in types)
    return _step_p.bind(*arrays, types=results, ways=ways)


def abstract_run(function: Callable[..., None], *arguments: Any) -> list[Any]:
    """Runs a function for what it notes about its arguments, without their values.

    Returns:
        The traced arrays that it uses and is not given.
    """

    def all_of_it(*arguments: Any) -> Any:
        return function(*arguments)

    closed = jax.make_jaxpr(all_of_it)(*arguments)
    return [x for x in closed.consts if isinstance(x, Tracer)]


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


_wait = _derivatives_do_not_wait(_plain)
_barrier_p = Primitive("optax_largebatch_barrier")
_barrier_p.multiple_results = True
_barrier_p.def_abstract_eval(lambda *types: types)
_barrier_p.def_impl(_plain)
mlir.register_lowering(_barrier_p, mlir.lower_fun(_plain))
# A call copies what goes through it: it is for numbers, and not for the arrays of `barrier`.
mlir.register_lowering(_barrier_p, mlir.lower_fun(_in_a_call), platform="cpu")
batching.primitive_batchers[_barrier_p] = lambda arrays, axes: (_barrier_p.bind(*arrays), axes)
_wait_for_reductions = _derivatives_do_not_wait(lambda *arrays: tuple(_barrier_p.bind(*arrays)))

_step_p = Primitive("optax_largebatch_step")
_step_p.multiple_results = True
_step_p.def_abstract_eval(lambda *arrays, types, ways: types)
_step_p.def_impl(lambda *arrays, types, ways: ways(None)(*arrays))


def _lowered(
    ctx: Any, *arrays: Any, types: Any, ways: Any, platform: str | None = None
) -> Sequence[Any]:
    """Lowers the way for the platform, if the module is for one device."""
    del types
    alone = getattr(ctx.module_context.axis_context, "num_devices", None) == 1
    way = ways(platform if alone else None)
    return mlir.lower_fun(_without_dead_code(way, ctx.avals_in))(ctx, *arrays)


mlir.register_lowering(_step_p, _lowered)
for own in ("cpu", "cuda", "rocm", "tpu"):
    mlir.register_lowering(_step_p, functools.partial(_lowered, platform=own), platform=own)


def _without_dead_code(way: Way, types: Sequence[ShapedArray]) -> Way:
    """The same program, in which no pass is given an array that it does not read.

    JAX ensures this in programs, but not inside a primitive. An array that a later pass seems to
    read cannot be overwritten by this pass.
    """
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in types]
    closed = jax.make_jaxpr(way)(*arrays)
    used = [True] * len(closed.jaxpr.outvars)
    program, _ = partial_eval.dce_jaxpr(closed.jaxpr, used, instantiate=True)
    return jaxpr_as_fun(ClosedJaxpr(program, closed.consts))


def _derivative(
    arrays: Sequence[Any], tangents: Sequence[Any], *, types: Any, ways: Any
) -> tuple[Any, Any]:
    """A step is differentiated as it runs anywhere."""
    del types
    tangents = tuple(map(ad.instantiate_zeros, tangents))
    return jax.jvp(ways(None), tuple(arrays), tangents)


def _batched(arrays: Sequence[Any], axes: Sequence[Any], *, types: Any, ways: Any) -> Any:
    """Steps of many networks at once are taken as they run anywhere."""
    del types
    results = jax.vmap(ways(None), in_axes=tuple(axes))(*arrays)
    return results, [0] * len(results)


ad.primitive_jvps[_step_p] = _derivative
batching.primitive_batchers[_step_p] = _batched
