"""Passes over sharded leaves under `jit`, on the shards of each device.

The compiler computes the right numbers for sharded leaves by itself, but not cheaply: every norm of
every leaf is a reduction of its own, or an operand of its own in a combined one. If `update` is
given the specs, the passes run on the shards, as inside `jax.shard_map`, and the norms of all
leaves travel as one vector.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np

from optax_largebatch.engine.program import LeafArrays, Program, Scalars
from optax_largebatch.engine.state import ArrayKind
from optax_largebatch.params.leaves import Leaves, spec_alike

Execute = Callable[[Mapping[int, LeafArrays], Scalars, Leaves], Any]
"""Takes the arrays of leaves, the scalars of the step and the leaves, which know how they are
split."""


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
    constants: list[Any] = []  # the results of a device, False if they are computed

    def constant(x: Any) -> Any:
        return x if isinstance(x, np.ndarray) else False

    def on_one_device(
        arrays: Mapping[int, LeafArrays],
        scalars: Scalars,
    ) -> Any:
        results = execute(arrays, scalars, dataclasses.replace(leaves, mesh=None))
        constants.append(jax.tree.map(constant, results))
        return jax.tree.map(jnp.asarray, results)

    def spec(index: int, x: Any, kind: ArrayKind = "per element") -> Any:
        if kind == "whole":
            return PartitionSpec()
        return spec_alike(specs[index], leaves.arrays[index].shape, x.shape)

    def specs_of(index: int, arrays: Any, state: Any) -> tuple[Any, ...]:
        """The specs of arrays like the leaf and of those in its state."""
        of_arrays = jax.tree.map(functools.partial(spec, index), arrays)
        kinds = programs[index].kinds_of_state(state)
        of_state = jax.tree.map(functools.partial(spec, index), state, kinds)
        return (*of_arrays, of_state)

    in_specs = {}
    out_specs = {}
    for i, (gradient, param, state) in arrays.items():
        in_specs[i] = LeafArrays(*specs_of(i, (gradient, param), state))
        update, new_state = programs[i].result_types
        out_specs[i] = specs_of(i, (update,), new_state)
    if AxisType.Explicit in leaves.mesh.axis_types:  # such arrays move only by `reshard`
        shardings = jax.tree.map(lambda spec: NamedSharding(leaves.mesh, spec), in_specs)
        arrays = jax.sharding.reshard(dict(arrays), shardings)
    results = jax.shard_map(
        on_one_device,
        mesh=leaves.mesh,
        in_specs=(in_specs, PartitionSpec()),
        out_specs=out_specs,
        check_vma=False,
    )(arrays, scalars)
    # XLA does not see that all devices have the same constant, and would send it around.
    return jax.tree.map(lambda x, known: x if known is False else known, results, constants[-1])
