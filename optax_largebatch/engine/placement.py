"""Chooses how a step runs by its place: when it is lowered, not when it is traced.

A program may be compiled ahead of time for a TPU on a CPU host, exported for three platforms at
once, or run on one of eight devices. What is known when it is traced are the types of its arrays.
The platform and the number of devices are known when it is lowered, so a step that may run on one
device is a primitive of its own, with a lowering for each platform.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir, partial_eval

from optax_largebatch.engine.reductions.cpu import CpuReductions
from optax_largebatch.engine.reductions.gpu import GpuReductions
from optax_largebatch.engine.reductions.gpu_mesh import GpuMeshReductions
from optax_largebatch.engine.reductions.leaf_by_leaf import LeafByLeaf
from optax_largebatch.engine.reductions.protocol import Reductions
from optax_largebatch.engine.reductions.xla import XlaReductions
from optax_largebatch.norms import is_on_a_mesh

Way = Callable[..., list[jax.Array]]
"""A step with sums taken in one way, from arrays to arrays."""

ON_ONE_DEVICE: Mapping[str, type[Reductions]] = {
    "cpu": CpuReductions,
    "cuda": GpuReductions,
    "rocm": GpuReductions,
    "tpu": LeafByLeaf,
}
"""The way to take sums on each platform, if one device has all leaves."""

ON_A_MESH: Mapping[str, type[Reductions]] = {"gpu": GpuMeshReductions}
"""The way to take sums on several devices, if it is not that of all others."""


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
        return step(on_a_mesh(arguments))(*arguments)
    arrays, structure = jax.tree.flatten(arguments)
    results, result = jax.tree.flatten(like)

    def way(reductions: Reductions) -> Way:
        taken = step(reductions)
        return lambda *arrays: jax.tree.leaves(taken(*structure.unflatten(arrays)))

    types = tuple(ShapedArray(x.shape, x.dtype) for x in results)
    return result.unflatten(_step.bind(*arrays, types=types, way=way))


def on_a_mesh(arrays: Any) -> Reductions:
    """The way to take sums on the mesh that the types of some arrays name.

    In older jax types do not say of what devices a mesh is; there, all meshes are alike.
    """
    meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays))
    devices = (getattr(mesh, "abstract_device", None) for mesh in meshes)
    platforms = (getattr(device, "platform", None) for device in devices)
    ways = {ON_A_MESH.get(platform, XlaReductions) for platform in platforms if platform}
    return ways.pop()() if len(ways) == 1 else XlaReductions()


_step = Primitive("optax_largebatch_step")
_step.multiple_results = True
_step.def_abstract_eval(lambda *arrays, types, way: types)
_step.def_impl(lambda *arrays, types, way: way(XlaReductions())(*arrays))


def _lowered(
    ctx: Any,
    *arrays: Any,
    types: Any,
    way: Callable[[Reductions], Way],
    on_one_device: type[Reductions] = XlaReductions,
) -> Sequence[Any]:
    """Lowers the way for the platform, if the module is for one device."""
    del types
    alone = getattr(ctx.module_context.axis_context, "num_devices", None) == 1
    own = way(on_one_device() if alone else XlaReductions())
    return mlir.lower_fun(_without_dead_code(own, ctx.avals_in))(ctx, *arrays)


mlir.register_lowering(_step, _lowered)
for platform, on_one_device in ON_ONE_DEVICE.items():
    lowered = functools.partial(_lowered, on_one_device=on_one_device)
    mlir.register_lowering(_step, lowered, platform=platform)


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
    arrays: Sequence[Any], tangents: Sequence[Any], *, types: Any, way: Callable[[Reductions], Way]
) -> Any:
    """A step is differentiated as it runs anywhere."""
    del types
    tangents = tuple(map(ad.instantiate_zeros, tangents))
    return jax.jvp(way(XlaReductions()), tuple(arrays), tangents)


def _batched(
    arrays: Sequence[Any], axes: Sequence[Any], *, types: Any, way: Callable[[Reductions], Way]
) -> Any:
    """Steps of many networks at once are taken as they run anywhere."""
    del types
    results = jax.vmap(way(XlaReductions()), in_axes=tuple(axes))(*arrays)
    return results, [0] * len(results)


ad.primitive_jvps[_step] = _derivative
batching.primitive_batchers[_step] = _batched
