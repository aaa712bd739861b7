"""Passes over sharded leaves under `jit`, on the shards of each device.

The compiler gets the numbers of sharded leaves right by itself, but not their cost: every norm of
every leaf is a reduction of its own, or an operand of its own in a combined one. Where `update` is
told how the leaves are split, the passes run on the shards, as inside `jax.shard_map`, and the
norms of all leaves travel as one vector.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from optax_largebatch.norms import Split
from optax_largebatch.params.leaves import Leaves
from optax_largebatch.transforms.passes import LeafArrays

Run = Callable[[Mapping[int, LeafArrays], Any, Callable[[int, tuple[int, ...]], Split]], Any]
"""Takes the arrays of leaves, the scalars of the step and how the leaves are split."""


def on_shards(run: Run, arrays: Mapping[int, LeafArrays], scalars: Any, leaves: Leaves) -> Any:
    """The result of `run`, computed on shards if it is known how the leaves are split."""
    if leaves.mesh is None:
        return run(arrays, scalars, leaves.split)
    specs = leaves.specs or []
    on_device = dataclasses.replace(leaves, mesh=None)
    numbers, structure = jax.tree.flatten(scalars)
    traced = {k: x for k, x in enumerate(numbers) if isinstance(x, jax.Array)}

    def on_one_device(arrays: Mapping[int, LeafArrays], traced: dict[int, Any]) -> Any:
        own = [traced.get(k, x) for k, x in enumerate(numbers)]
        results = run(arrays, structure.unflatten(own), on_device.split)
        return jax.tree.map(jnp.asarray, results)

    def specs_of(tree: Mapping[int, Any]) -> dict[int, Any]:
        return {
            i: jax.tree.map(lambda x, i=i: _as_leaf(specs[i], leaves.arrays[i], x), own)
            for i, own in tree.items()
        }

    def on_whole_leaves(arrays: Mapping[int, LeafArrays], scalars: Any) -> Any:
        return run(arrays, scalars, lambda index, kept: Split())

    whole = jax.eval_shape(on_whole_leaves, arrays, scalars)
    in_specs = specs_of(arrays)
    arrays = jax.tree.map(lambda x, spec: _placed(x, spec, leaves.mesh), dict(arrays), in_specs)
    return jax.shard_map(
        on_one_device,
        mesh=leaves.mesh,
        in_specs=(in_specs, PartitionSpec()),
        out_specs=specs_of(whole),
        check_vma=False,
    )(arrays, traced)


def _as_leaf(spec: PartitionSpec, leaf: jax.Array, x: Any) -> PartitionSpec:
    """The spec of an array that goes with a leaf: split where it is as long as the leaf."""
    shape = jnp.shape(x)
    if len(shape) != leaf.ndim:
        return PartitionSpec()
    columns = zip(spec, shape, leaf.shape, strict=False)
    return PartitionSpec(*(entry if size == like else None for entry, size, like in columns))


def _placed(x: jax.Array, spec: PartitionSpec, mesh: Any) -> jax.Array:
    """The array on a mesh of explicit axes, whose arrays move only when they are told to."""
    if jax.sharding.AxisType.Explicit not in mesh.axis_types:
        return x
    return jax.sharding.reshard(x, jax.sharding.NamedSharding(mesh, spec))
