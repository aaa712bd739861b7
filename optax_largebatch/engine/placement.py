"""Where a step runs, decided by the step and not by the process that traces it.

A program may be compiled ahead of time for a TPU on a CPU host, exported for three platforms at
once, or run on one of eight devices. What is known when it is traced are the types of its arrays.
The platform and the number of devices are known when it is lowered, so a step that may run on one
device is a primitive of its own, with a lowering for each platform.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir, partial_eval

from optax_largebatch import norms
from optax_largebatch.engine.reductions.cpu import CpuReductions
from optax_largebatch.engine.reductions.protocol import Reductions
from optax_largebatch.engine.reductions.xla import XlaReductions

Way = Callable[..., list[jax.Array]]
"""A step with sums taken in one way, from arrays to arrays."""


def where_it_runs(
    step: Callable[[Reductions], Callable[..., Any]], like: Any, *arguments: Any
) -> Any:
    """The result of a step, computed in the way that suits the place where it runs.

    Args:
        step: the step, for a given way to take sums. It closes over no traced array.
        like: a tree of arrays with the shapes and dtypes of the result.
        *arguments: trees of arrays.
    """
    if is_on_a_mesh(arguments):
        return step(XlaReductions())(*arguments)
    arrays, structure = jax.tree.flatten(arguments)
    results, result = jax.tree.flatten(like)

    def way(reductions: Reductions) -> Way:
        taken = step(reductions)
        return lambda *arrays: jax.tree.leaves(taken(*structure.unflatten(arrays)))

    types = tuple(ShapedArray(x.shape, x.dtype) for x in results)
    anywhere, on_one_cpu = way(XlaReductions()), way(CpuReductions())
    return result.unflatten(
        _step.bind(*arrays, types=types, anywhere=anywhere, on_one_cpu=on_one_cpu)
    )


def is_on_a_mesh(arrays: Any) -> bool:
    """Whether the types of some arrays say that they are on several devices.

    They are silent where only `in_shardings` say so, and in jax before 0.10; the lowering knows.
    """

    def says_so(x: Any) -> bool:
        mesh = jax.typeof(x).sharding.mesh
        split = not mesh.empty and (mesh.size > 1 or any(norms.explicit_spec(x)))
        return split or bool(norms.varying_axes(x))

    return any(map(says_so, jax.tree.leaves(arrays)))


_step = Primitive("optax_largebatch_step")
_step.multiple_results = True
_step.def_abstract_eval(lambda *arrays, types, anywhere, on_one_cpu: types)
_step.def_impl(lambda *arrays, types, anywhere, on_one_cpu: anywhere(*arrays))


def _lowered_anywhere(
    ctx: Any, *arrays: Any, types: Any, anywhere: Way, on_one_cpu: Way
) -> Sequence[Any]:
    del types, on_one_cpu
    return mlir.lower_fun(_without_dead_code(anywhere, ctx.avals_in))(ctx, *arrays)


def _lowered_on_cpus(
    ctx: Any, *arrays: Any, types: Any, anywhere: Way, on_one_cpu: Way
) -> Sequence[Any]:
    """The way for one CPU, if the module is for one device."""
    del types
    alone = getattr(ctx.module_context.axis_context, "num_devices", None) == 1
    way = on_one_cpu if alone else anywhere
    return mlir.lower_fun(_without_dead_code(way, ctx.avals_in))(ctx, *arrays)


mlir.register_lowering(_step, _lowered_anywhere)
mlir.register_lowering(_step, _lowered_on_cpus, platform="cpu")


def _without_dead_code(way: Way, types: Sequence[ShapedArray]) -> Way:
    """The same program, in which no pass is handed an array that it does not read.

    JAX sees to that in programs, but not inside a primitive; and an array that a later pass seems
    to read cannot be overwritten by this one.
    """
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in types]
    closed = jax.make_jaxpr(way)(*arrays)
    used = [True] * len(closed.jaxpr.outvars)
    program, _ = partial_eval.dce_jaxpr(closed.jaxpr, used, instantiate=True)
    return jaxpr_as_fun(ClosedJaxpr(program, closed.consts))


def _derivative(
    arrays: Sequence[Any], tangents: Sequence[Any], *, types: Any, anywhere: Way, on_one_cpu: Way
) -> Any:
    """A step is differentiated as it runs anywhere."""
    del types, on_one_cpu
    return jax.jvp(anywhere, tuple(arrays), tuple(map(ad.instantiate_zeros, tangents)))


def _batched(
    arrays: Sequence[Any], axes: Sequence[Any], *, types: Any, anywhere: Way, on_one_cpu: Way
) -> Any:
    """Steps of many networks at once are taken as they run anywhere."""
    del types, on_one_cpu
    results = jax.vmap(anywhere, in_axes=tuple(axes))(*arrays)
    return results, [0] * len(results)


ad.primitive_jvps[_step] = _derivative
batching.primitive_batchers[_step] = _batched
