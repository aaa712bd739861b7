"""Passes over sharded leaves under `jit`, on the shards of each device.

The compiler computes the right numbers for sharded leaves by itself, but not cheaply: every norm of
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
import numpy as np

from optax_largebatch.engine.arrays import LeafArrays, Scalars
from optax_largebatch.engine.state import ArrayKind
from optax_largebatch.engine.transform import LeafTransform
from optax_largebatch.params.leaves import Leaves, spec_alike

Run = Callable[[Mapping[int, LeafArrays], Scalars, Leaves], Any]
"""Takes the arrays of leaves, the scalars of the step and the leaves, which know how they are
split."""


def on_shards(
    transform: LeafTransform,
    run: Run,
    arrays: Mapping[int, LeafArrays],
    scalars: Scalars,
    leaves: Leaves,
) -> Any:
    """The result of `run`, computed on shards if `leaves` say how they are split."""
    if leaves.mesh is None:
        return run(arrays, scalars, leaves)
    specs = leaves.specs or []
    on_device = dataclasses.replace(leaves, mesh=None)

    known: list[Any] = []  # the results of one device, False in the place of what is computed

    def on_one_device(arrays: Mapping[int, LeafArrays], scalars: Scalars) -> Any:
        results = run(arrays, scalars, on_device)
        known.append(jax.tree.map(lambda x: isinstance(x, np.ndarray) and x, results))
        return jax.tree.map(jnp.asarray, results)

    def spec(index: int, x: Any, kind: ArrayKind = "per element") -> Any:
        shape = leaves.arrays[index].shape
        whole = kind == "whole"
        return PartitionSpec() if whole else spec_alike(specs[index], shape, jnp.shape(x))

    def specs_of_state(index: int, state: Any) -> Any:
        return jax.tree.map(lambda x, kind: spec(index, x, kind), state, transform.kinds(state))

    def on_whole_leaves(arrays: Mapping[int, LeafArrays], scalars: Scalars) -> Any:
        return run(arrays, scalars, dataclasses.replace(leaves, specs=None, mesh=None))

    if not hasattr(jax, "shard_map"):  # jax 0.6.0: the same numbers, in more all-reduces
        return on_whole_leaves(arrays, scalars)
    whole = jax.eval_shape(on_whole_leaves, arrays, scalars)
    in_specs = {
        i: LeafArrays(
            spec(i, own.gradient),
            None if own.param is None else spec(i, own.param),
            specs_of_state(i, own.state),
        )
        for i, own in arrays.items()
    }
    out_specs = {
        i: (spec(i, update), specs_of_state(i, state)) for i, (update, state) in whole.items()
    }
    arrays = jax.tree.map(lambda x, spec: _placed(x, spec, leaves.mesh), dict(arrays), in_specs)
    results = jax.shard_map(
        on_one_device,
        mesh=leaves.mesh,
        in_specs=(in_specs, PartitionSpec()),
        out_specs=out_specs,
        check_vma=False,
    )(arrays, scalars)
    # Of a constant from inside XLA does not see that all devices have it: it sends it around.
    return jax.tree.map(lambda x, own: x if own is False else own, results, known[-1])


def _placed(x: jax.Array, spec: PartitionSpec, mesh: Any) -> jax.Array:
    """The array on a mesh of explicit axes, whose arrays move only when they are told to."""
    if jax.sharding.AxisType.Explicit not in mesh.axis_types:
        return x
    return jax.sharding.reshard(x, jax.sharding.NamedSharding(mesh, spec))
