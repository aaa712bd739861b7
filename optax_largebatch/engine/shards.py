"""Passes over sharded leaves under `jit`, on the shards of each device.

The compiler computes the right numbers for sharded leaves by itself, but not cheaply: every norm of
every leaf is a reduction of its own, or an operand of its own in a combined one. If `update` is
given the specs, the passes run on the shards, as inside `jax.shard_map`, and the norms of all
leaves travel as one vector.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optax_largebatch.engine.program import LeafArrays, Program, Scalars
from optax_largebatch.engine.state import ArrayKind
from optax_largebatch.params.leaves import Leaves, spec_alike

Execute = Callable[[Mapping[int, LeafArrays], Scalars], Any]
"""Takes the arrays of leaves and the scalars of the step."""


def on_shards(
    programs: Mapping[int, Program],
    execute: Execute,
    arrays: Mapping[int, LeafArrays],
    scalars: Scalars,
    leaves: Leaves,
) -> Any:
    """The results of `execute` on the shards of each device.

    Args:
        programs: the program of each whole leaf; they say what shapes the results have.
        execute: takes the step on one device.
        arrays: the arrays of whole leaves.
        scalars: the scalars of the step.
        leaves: the leaves, with their specs and mesh.
    """
    specs = leaves.specs or []

    def specs_of(index: int, tree: Any, kinds: Sequence[ArrayKind]) -> Any:
        """The specs of arrays of these kinds that belong to a leaf."""
        of_arrays = []
        flat, structure = jax.tree.flatten(tree)
        for x, kind in zip(flat, kinds, strict=True):
            alike = spec_alike(specs[index], leaves.arrays[index].shape, x.shape)
            of_arrays.append(PartitionSpec() if kind == "whole" else alike)
        return structure.unflatten(of_arrays)

    in_specs = {i: specs_of(i, leaf, programs[i].kinds) for i, leaf in arrays.items()}
    out_specs = {i: specs_of(i, x.result_types, x.result_kinds) for i, x in programs.items()}
    if AxisType.Explicit in leaves.mesh.axis_types:  # such arrays move only by `reshard`
        shardings = jax.tree.map(lambda spec: NamedSharding(leaves.mesh, spec), in_specs)
        arrays = jax.sharding.reshard(dict(arrays), shardings)
    return jax.shard_map(
        execute,
        mesh=leaves.mesh,
        in_specs=(in_specs, PartitionSpec()),
        out_specs=out_specs,
        check_vma=False,
    )(arrays, scalars)
