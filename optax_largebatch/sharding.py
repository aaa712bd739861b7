"""The layout of an optimizer's state on a mesh of devices."""

import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import optax

from optax_largebatch.engine import PerAxis
from optax_largebatch.engine.recorded_states import recorded_states
from optax_largebatch.params.leaves import mesh_axes, spec_alike
from optax_largebatch.params.owners import owners


def optimizer_state_shardings(
    optimizer: optax.GradientTransformation,
    params: optax.Params,
    mesh: Mesh,
    *,
    axis: str | tuple[str, ...] | None = None,
) -> Any:
    r"""The shardings of an optimizer's state: moments lie where their parameters lie.

    With `axis`, the moments are also split along that mesh axis (ZeRO stage 1), each on the longest
    of its own axes that can be split. The parameters stay whole; each device updates its part of
    the moments, and the compiler gathers the updates.

    Parts of the state are matched to parameters by their keys: a part with the keys of some or all
    parameters belongs to these.

    Hand the result to `jax.jit` as `out_shardings` of `init` and of the step. For
    `jax.shard_map`, `jax.tree.map(lambda s: s.spec, shardings)` are the specs. For a state in host
    memory, `jax.tree.map(lambda s: s.with_memory_kind("pinned_host"), shardings)`; the step then
    begins with `jax.device_put(state, shardings)`.

    Args:
        optimizer: any transformation of optax.
        params: the parameters, or `jax.ShapeDtypeStruct` with a `sharding`; parameters without a
            `NamedSharding` count as whole on every device.
        mesh: the mesh.
        axis: the mesh axis, or axes, to split moments along; None to leave them whole.

    Returns:
        A tree like the state, of `NamedSharding`. Arrays that are not like a parameter are whole on
        every device: counters, trust ratios, and the rows and columns of `optax.adafactor`.

    Raises:
        ValueError: `mesh` has no axis of that name.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import lamb, optimizer_state_shardings
        >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
        >>> params = {"kernel": jnp.ones((4, 1024)), "bias": jnp.ones(3)}
        >>> optimizer = lamb(1e-3)
        >>> shardings = optimizer_state_shardings(optimizer, params, mesh, axis="data")
        >>> state = jax.jit(optimizer.init, out_shardings=shardings)(params)
        >>> print(tuple(state[1].mu["kernel"].sharding.spec))
        (None, 'data')

    References:
        Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*,
        arXiv 1910.02054, section 5.1.
    """
    names = mesh_axes(axis)
    for name in names:
        if name not in mesh.shape:
            raise ValueError(
                f"axis names {name!r}, and the mesh has the axes {', '.join(mesh.shape)}."
            )

    def like_its_parameter(moment: Any, param: Any) -> PartitionSpec:
        sharding = getattr(param, "sharding", None)
        spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
        if moment.shape == param.shape:
            spec = _split_further(spec, moment.shape, names, mesh)
        return spec_alike(spec, param.shape, moment.shape)

    state, are_of_axes = _first_state(optimizer, params)
    leaves = jax.tree.leaves(params)
    structure = jax.tree.structure(state)
    known = zip(jax.tree.leaves(state), owners(state, params), are_of_axes, strict=True)
    specs = [
        PartitionSpec() if owner is None or is_of_axes else like_its_parameter(array, leaves[owner])
        for array, owner, is_of_axes in known
    ]
    return structure.unflatten([NamedSharding(mesh, spec) for spec in specs])


def _first_state(
    optimizer: optax.GradientTransformation,
    params: Any,
) -> tuple[Any, list[bool]]:
    """The shapes of the first state, and whether each array of it is one of axes.

    In a tuple for each parameter it may have the keys of a parameter that is in a tuple, too.
    """
    are_of_axes: list[bool] = []

    def init(params: Any) -> Any:
        with recorded_states() as record:
            state = optimizer.init(params)
        of_axes = {
            id(array)
            for made in record
            for field, value in zip(made.transform.state, made.state, strict=True)
            if isinstance(field, PerAxis)
            for array in jax.tree.leaves(value)
        }
        are_of_axes.extend(id(array) in of_axes for array in jax.tree.leaves(state))
        return state

    return jax.eval_shape(init, params), are_of_axes


def _split_further(
    spec: PartitionSpec, shape: tuple[int, ...], names: tuple[str, ...], mesh: Mesh
) -> PartitionSpec:
    """The spec with the mesh axes added on the longest axis that they divide, if there is one."""
    taken = {name for entry in spec for name in mesh_axes(entry)}
    added = tuple(name for name in names if name not in taken)
    devices = math.prod(mesh.shape[name] for name in added)
    entries: list[Any] = [*spec, *[None] * (len(shape) - len(spec))]
    free = [
        axis
        for axis, size in enumerate(shape)
        if entries[axis] is None and size >= devices and size % devices == 0
    ]
    if not added or not free:
        return spec
    longest = max(free, key=lambda axis: shape[axis])
    entries[longest] = added
    return PartitionSpec(*entries)
