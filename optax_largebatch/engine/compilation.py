"""How a step is compiled; this changes its speed and no number. All uses of JAX's internals.

A program may be compiled ahead of time for a TPU on a CPU host, exported for three platforms at
once, or run on one of eight devices. Tracing knows the types of its arrays. Only lowering knows the
platform and the number of devices. So a step that may run on one device is a primitive with a
lowering for each platform. So is a barrier that XLA on a CPU would drop. README.md lists what
breaks without each of JAX's internal names.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import functools
from typing import Any, TypeVar

import jax
from jax.core import ShapedArray, Tracer
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir, partial_eval

from optax_largebatch import norms

MAX_CHUNK = 32
"""The numbers that one kernel computes. XLA makes a kernel of each of many more."""

Item = TypeVar("Item")
Result = TypeVar("Result")
Tree = TypeVar("Tree")

Lowering = Callable[..., list[jax.Array]]
"""A step as it runs on one kind of device, from arrays to arrays."""


def dispatch_by_platform(
    lowerings: Callable[[str | None], Lowering],
    types: Sequence[Any],
    *arrays: Any,
) -> list[Any]:
    """The results of a step, from the lowering for the platform where it runs.

    Args:
        lowerings: the lowering for one device of a platform ("cpu", "cuda", "rocm", "tpu"), or, for
            None, the lowering for any number of devices. It closes over no traced array.
        types: arrays with the shapes and dtypes of the results.
        *arrays: the arguments of the lowering.
    """
    results = tuple([ShapedArray(x.shape, x.dtype) for x in types])
    return _step_p.bind(*arrays, types=results, lowerings=lowerings)


def closed_over_tracers(
    function: Callable[..., None],
    *arguments: Any,
) -> list[Any]:
    """The traced arrays that a function uses and is not given.

    The function is run for what it notes about its arguments; nothing is computed.
    """

    def fresh(*arguments: Any) -> Any:  # JAX would not run the same function twice
        return function(*arguments)

    closed = jax.make_jaxpr(fresh)(*arguments)
    return [x for x in closed.consts if isinstance(x, Tracer)]


def no_inline() -> contextlib.AbstractContextManager[Any]:
    """Keeps XLA on a CPU from inlining the jitted functions that are called here.

    On an accelerator it would make them slower, so use it only in what is lowered for CPUs.
    """
    return set_xla_metadata(inlineable="false")


def allow_inlining(function: Callable[..., Result]) -> Callable[..., Result]:
    """The same function, in which all calls may be inlined, even inside `no_inline`.

    Otherwise each `jnp.where` in it, which is a jitted function too, would be a call.
    """
    return _inlining()(function)


def chunked(items: Sequence[Item]) -> list[Sequence[Item]]:
    """The items in order, in chunks of which one kernel can take all."""
    return [items[start : start + MAX_CHUNK] for start in range(0, len(items), MAX_CHUNK)]


@contextlib.contextmanager
def _inlining() -> Iterator[None]:
    with set_xla_metadata(inlineable=None):  # it is no decorator in jax 0.7
        yield


def barrier(arrays: Tree) -> Tree:
    """The same tree, in which no array is available before all are.

    Inside `jax.shard_map`, arrays that differ between devices wait separately; otherwise all would
    get a type that differs between devices.
    """
    return _by_varying_axes(_wait, arrays)


def reduction_barrier(arrays: Tree) -> Tree:
    """The same tree, in which no array is available before all are, as with `barrier`.

    So the compiler can combine the reductions that made them, although other work could start
    earlier.
    """
    return _by_varying_axes(_wait_for_reductions, arrays)


def _by_varying_axes(wait: Callable[..., Any], arrays: Tree) -> Tree:
    """The same tree, after arrays that vary along the same axes have waited for each other."""
    leaves, structure = jax.tree.flatten(arrays)
    axes = list(map(norms.varying_axes, leaves))
    for varying in dict.fromkeys(axes):  # a set has another order in each process of a run
        places = [place for place, of_leaf in enumerate(axes) if of_leaf == varying]
        waited = wait(*[leaves[place] for place in places])
        for place, x in zip(places, waited, strict=True):
            leaves[place] = x
    return structure.unflatten(leaves)


def _derivatives_do_not_wait(barrier: Callable[..., Any]) -> Callable[..., Any]:
    """Lets derivatives pass: an infinite one would meet the zeros of all others."""
    waiting = jax.custom_jvp(barrier)
    waiting.defjvp(lambda primals, tangents: (waiting(*primals), tangents))
    return waiting


def _plain(*arrays: jax.Array) -> Any:
    return jax.lax.optimization_barrier(arrays)


def _in_a_call(*arrays: jax.Array) -> Any:
    """XLA on a CPU drops a barrier before it combines reductions, but not one in a call."""
    with no_inline():
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
_step_p.def_abstract_eval(lambda *arrays, types, lowerings: types)
_step_p.def_impl(lambda *arrays, types, lowerings: lowerings(None)(*arrays))


def _lowered(
    ctx: Any,
    *arrays: Any,
    types: Any,
    lowerings: Any,
    platform: str | None = None,
) -> Sequence[Any]:
    """The lowering for the platform, if the module is for one device."""
    del types
    is_one_device = getattr(ctx.module_context.axis_context, "num_devices", None) == 1
    lowering = lowerings(platform if is_one_device else None)
    return mlir.lower_fun(_without_dead_code(lowering, ctx.avals_in))(ctx, *arrays)


mlir.register_lowering(_step_p, _lowered)
for name in ("cpu", "cuda", "rocm", "tpu"):
    mlir.register_lowering(_step_p, functools.partial(_lowered, platform=name), platform=name)


def _without_dead_code(
    lowering: Lowering,
    types: Sequence[ShapedArray],
) -> Lowering:
    """The same program, in which no pass is given an array that it does not read.

    JAX ensures this in programs, but not inside a primitive. A pass cannot overwrite an array that
    a later pass seems to read.
    """
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in types]
    closed = jax.make_jaxpr(lowering)(*arrays)
    is_used = [True] * len(closed.jaxpr.outvars)
    program, _ = partial_eval.dce_jaxpr(closed.jaxpr, is_used, instantiate=True)
    return jaxpr_as_fun(ClosedJaxpr(program, closed.consts))


def _derivative(
    arrays: Sequence[Any],
    tangents: Sequence[Any],
    *,
    types: Any,
    lowerings: Any,
) -> tuple[Any, Any]:
    """The derivative of the lowering for any number of devices."""
    del types
    tangents = tuple(map(ad.instantiate_zeros, tangents))
    return jax.jvp(lowerings(None), tuple(arrays), tangents)


def _batched(
    arrays: Sequence[Any],
    axes: Sequence[Any],
    *,
    types: Any,
    lowerings: Any,
) -> Any:
    """Steps of several networks at once, by the lowering for any number of devices."""
    del types
    results = jax.vmap(lowerings(None), in_axes=tuple(axes))(*arrays)
    return results, [0] * len(results)


ad.primitive_jvps[_step_p] = _derivative
batching.primitive_batchers[_step_p] = _batched
