"""Where a step runs, decided by the step and not by the process that traces it.

A program may be compiled ahead of time for a TPU on a CPU host, exported for three platforms at
once, or run on one of eight devices. What is known when it is traced are the types of its arrays.
The platform and the number of devices are known when it is lowered, so a step that may run on one
device is a primitive of its own with a lowering for each platform.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir, partial_eval

from optax_largebatch import norms
from optax_largebatch.engine.reductions.cpu import CpuReductions
from optax_largebatch.engine.reductions.protocol import Reductions
from optax_largebatch.engine.reductions.xla import XlaReductions

Step = Callable[[Reductions], Callable[..., Any]]
"""The step with sums taken in a given way."""


def where_it_runs(step: Step, *arguments: Any) -> Any:
    """The result of a step, computed in the way that suits the place where it runs.

    Args:
        step: the step, for a given way to take sums.
        *arguments: trees of arrays.
    """
    arrays, structure = jax.tree.flatten(arguments)
    anywhere = step(XlaReductions())
    if any(map(_is_on_a_mesh, arrays)):
        return anywhere(*arguments)

    def traced(step: Callable[..., Any]) -> tuple[ClosedJaxpr, Any]:
        flat = jax.make_jaxpr(lambda *x: step(*structure.unflatten(x)), return_shape=True)
        closed, shapes = flat(*arrays)
        return _without_dead_code(closed), jax.tree.structure(shapes)

    plain, result = traced(anywhere)
    on_one_cpu, _ = traced(step(CpuReductions()))
    outer = {id(x): x for x in (*plain.consts, *on_one_cpu.consts) if isinstance(x, Tracer)}
    if outer:
        plain, on_one_cpu = (_closed_again(x, outer, arrays) for x in (plain, on_one_cpu))
    both = [*outer.values(), *arrays]
    return result.unflatten(_step.bind(*both, anywhere=plain, on_one_cpu=on_one_cpu))


def _without_dead_code(way: ClosedJaxpr) -> ClosedJaxpr:
    """The same program, in which no pass is handed an array that it does not read.

    JAX does this for programs, but not for those inside a primitive; and an array that a later
    pass seems to read cannot be overwritten by this one.
    """
    used = [True] * len(way.jaxpr.outvars)
    program, _ = partial_eval.dce_jaxpr(way.jaxpr, used, instantiate=True)
    return ClosedJaxpr(program, way.consts)


def _closed_again(way: ClosedJaxpr, outer: dict[int, Any], arrays: Sequence[Any]) -> ClosedJaxpr:
    """A program with arguments for what it has closed over, such as a traced learning rate."""

    def run(*arguments: Any) -> list[Any]:
        given = dict(zip(outer, arguments, strict=False))
        consts = [given.get(id(x), x) for x in way.consts]
        return jaxpr_as_fun(ClosedJaxpr(way.jaxpr, consts))(*arguments[len(outer) :])

    return jax.make_jaxpr(run)(*outer.values(), *arrays)


def _is_on_a_mesh(x: Any) -> bool:
    """Whether the type of an array says that it is on several devices.

    It is silent where only `in_shardings` say so, and in jax before 0.10; then the lowering knows.
    """
    mesh = jax.typeof(x).sharding.mesh
    of_type = not mesh.empty and (mesh.size > 1 or any(norms.explicit_spec(x)))
    return of_type or bool(norms.varying_axes(x))


_step = Primitive("optax_largebatch_step")
_step.multiple_results = True
_step.def_abstract_eval(lambda *arrays, anywhere, on_one_cpu: anywhere.out_avals)
_step.def_impl(lambda *arrays, anywhere, on_one_cpu: jaxpr_as_fun(anywhere)(*arrays))


def _lowered_anywhere(ctx: Any, *arrays: Any, anywhere: ClosedJaxpr, on_one_cpu: Any) -> Any:
    return mlir.lower_fun(jaxpr_as_fun(anywhere), multiple_results=True)(ctx, *arrays)


def _lowered_on_cpus(ctx: Any, *arrays: Any, anywhere: Any, on_one_cpu: ClosedJaxpr) -> Any:
    """The way for one CPU, if the module is for one device."""
    devices = getattr(ctx.module_context.axis_context, "num_devices", None)
    way = on_one_cpu if devices == 1 else anywhere
    return mlir.lower_fun(jaxpr_as_fun(way), multiple_results=True)(ctx, *arrays)


mlir.register_lowering(_step, _lowered_anywhere)
mlir.register_lowering(_step, _lowered_on_cpus, platform="cpu")


def _derivative(
    arrays: Sequence[Any], tangents: Sequence[Any], *, anywhere: ClosedJaxpr, on_one_cpu: Any
) -> Any:
    """A step is differentiated as it runs anywhere."""
    filled = map(ad.instantiate_zeros, tangents)
    return jax.jvp(jaxpr_as_fun(anywhere), tuple(arrays), tuple(filled))


def _batched(
    arrays: Sequence[Any], axes: Sequence[Any], *, anywhere: ClosedJaxpr, on_one_cpu: Any
) -> Any:
    """Steps of many networks at once are taken as they run anywhere."""
    results = jax.vmap(jaxpr_as_fun(anywhere), in_axes=tuple(axes))(*arrays)
    return results, [0] * len(results)


ad.primitive_jvps[_step] = _derivative
batching.primitive_batchers[_step] = _batched
