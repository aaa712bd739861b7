"""Work on whole matrices, wherever their shards are.

Matrices that are split by rows or columns are exchanged (`all_to_all.py`). Whole matrices do not
move, even if devices have different layers of a stack. If `update` is not given the specs but the
types know the mesh, the compiler is asked for the same.
"""

from collections.abc import Sequence
import itertools
from typing import Any
import warnings

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optax_largebatch import norms
from optax_largebatch.engine.compilation import allow_inlining, barrier
from optax_largebatch.engine.identical_leaves import Batch, gradients_of, replace_gradients
from optax_largebatch.engine.matrices.all_to_all import AllToAll
from optax_largebatch.engine.matrices.layouts import (
    Exchange,
    choose_plan,
    layout_of,
    splitting,
    with_the_matrices_inside,
)
from optax_largebatch.engine.matrices.side_by_side import (
    multiplied,
    multiplied_together,
    taken_apart,
    tasks_by,
)
from optax_largebatch.engine.program import LeafArrays, PassInputs, Program, Scalars
from optax_largebatch.engine.requests import EachMatrix, MatrixFunction, Tasks
from optax_largebatch.params.leaves import mesh_axes
from optax_largebatch.params.matrices import Matrices


def matrices_round(
    waiting: Sequence[Batch],
    scalars: Scalars,
    following: Sequence[Batch],
    side_by_side: bool,
) -> None:
    """Takes a round of work on the matrices of leaves, each of which is a batch by itself.

    Args:
        waiting: the leaves.
        scalars: the scalars of the step.
        following: other leaves, whose gradients wait until the matrices are multiplied.
        side_by_side: whether matrices of one shape, of several leaves, are one batch.
    """
    leaves = {i: batch for batch in waiting for i in batch.leaves}
    functions: dict[int, Any] = {i: batch.remaining[0].of_each for i, batch in leaves.items()}
    alike = {i: EachMatrix(x, (), functions[i]) for i, x in gradients_of(waiting).items()}
    order = batches(alike, side_by_side)
    one_pass = jax.jit(allow_inlining(_stored_and_matrices), static_argnums=0)
    for now, then in itertools.zip_longest(order, order[1:], fillvalue={}):
        stored: dict[int, Sequence[jax.Array]] = {}
        tasks: dict[int, EachMatrix] = {}
        for i in now:
            batch = leaves[i]
            stored[i], array, numbers = one_pass(
                batch.program, batch.leaves[i], scalars, batch.inputs
            )
            tasks[i] = EachMatrix(array, numbers, functions[i])
        waits = [*(leaves[i] for i in then), *following]
        results, gradients = apply_to_matrices(tasks, gradients_of(waits), side_by_side)
        replace_gradients(waits, gradients)
        for i, result in results.items():
            leaves[i].inputs = leaves[i].inputs.after(stored[i], [result])


def _stored_and_matrices(
    program: Program,
    leaf: LeafArrays,
    scalars: Scalars,
    inputs: PassInputs,
) -> tuple[Sequence[jax.Array], jax.Array, list[jax.Array]]:
    """What is stored before the round, the array of matrices, and the function's numbers."""
    stop = program.run(leaf, scalars, inputs)
    request: Any = stop.request
    array, *numbers = request.arrays(leaf.dtype())
    return stop.stored, array, numbers


def batches(tasks: Tasks, side_by_side: bool) -> list[Tasks]:
    """Groups of arrays whose matrices are exchanged and worked on together, in order.

    First those that move, so that communication overlaps with other work. If nothing moves, each
    array is a group, or with `side_by_side` those that fill a device. The large ones come first:
    results pile up, and work on a small array needs less memory then.
    """
    mesh = _mesh_of_types(tasks)
    tasks = _with_the_matrices_inside(tasks, mesh)
    exchanges = _exchanges(tasks)
    if mesh is not None:
        _warn_if_specs_are_unknown(tasks, mesh)
        return list(exchanges.values())
    moving: list[Tasks] = []
    staying: list[Tasks] = []
    for exchange, group in exchanges.items():
        if exchange.moves:
            moving += _batches_of(exchange, group)
        else:
            staying += multiplied_together(group, side_by_side)
    staying.sort(key=lambda group: -sum(task.array.size for task in group.values()))
    return [*moving, *staying]


def _with_the_matrices_inside(tasks: Tasks, mesh: Any) -> Tasks:
    """The tasks for the matrices that those of arrays are fused of."""
    is_automatic = mesh is not None
    return {key: with_the_matrices_inside(task, is_automatic) for key, task in tasks.items()}


def _exchanges(tasks: Tasks) -> dict[Exchange, Tasks]:
    """The arrays of each exchange.

    Where wide matrices leave devices idle, narrower ones of the same height take part in their
    exchange, filled up with columns of zeros, if that costs less.
    """
    exchanges = tasks_by(_exchange, tasks)
    for wide, narrow in itertools.permutations(list(exchanges), 2):
        if {wide, narrow} <= exchanges.keys() and narrow.fits_into(wide):
            together = {**exchanges[wide], **exchanges[narrow]}
            separate = choose_plan(wide, exchanges[wide]).cost
            separate += choose_plan(narrow, exchanges[narrow]).cost
            if choose_plan(wide, together).cost < separate:
                exchanges[wide] = together
                del exchanges[narrow]
    return exchanges


def _batches_of(exchange: Exchange, tasks: Tasks) -> Sequence[Tasks]:
    """Groups of the arrays of one exchange.

    A device whose matrices have two layouts computes each of them in both, and needs memory for
    both. So matrices of one layout are a group by themselves, if that leaves no device idle and
    costs no more.
    """
    by_layout = tasks_by(layout_of, tasks).values()
    plans = [choose_plan(exchange, some) for some in by_layout]
    cost = sum(plan.cost for plan in plans)
    is_idle = any(plan.padding for plan in plans)
    if is_idle or cost > choose_plan(exchange, tasks).cost:
        return [tasks]
    return list(by_layout)


def apply_to_matrices(
    tasks: Tasks,
    following: Any,
    side_by_side: bool,
) -> tuple[dict[Any, jax.Array], Any]:
    """The results for the matrices of several arrays, each by its function.

    Args:
        tasks: the arrays of one batch, and the functions of their matrices.
        following: the arrays of the next batch. They wait until the matrices of this batch have
            arrived, so the next ones travel during this work. If nothing moves, they wait until the
            work is done. Otherwise all batches would be in memory at once.
        side_by_side: whether matrices of one shape, of several arrays, are one batch.

    Returns:
        The results, and `following`.
    """
    mesh = _mesh_of_types(tasks)
    if mesh is not None and AxisType.Explicit in mesh.axis_types:
        return _by_their_types(tasks, following, mesh, side_by_side)
    shapes = {key: task.array.shape for key, task in tasks.items()}
    tasks = _with_the_matrices_inside(tasks, mesh)
    if mesh is not None:
        return barrier((_by_the_compiler(tasks, mesh), following))
    together = _exchanges(tasks)
    exchanges = [AllToAll(x, some) for x, some in together.items() if x.moves]
    received = [exchange.received() for exchange in exchanges]
    if exchanges:
        received, following = barrier((received, following))
    results: dict[Any, jax.Array] = {}
    for exchange, pieces in zip(exchanges, received, strict=True):
        results |= exchange.results(pieces)
    staying: list[Tasks] = []
    for exchange, some in together.items():
        if not exchange.moves:
            staying += multiplied_together(some, side_by_side)
    stacks = list(map(multiplied, staying))
    if not exchanges and jax.tree.leaves(following):
        stacks, following = barrier((stacks, following))
    for some, stack in zip(staying, stacks, strict=True):
        results |= taken_apart(some, stack)
    return {key: results[key].reshape(shapes[key]) for key in tasks}, following


def _exchange(task: EachMatrix) -> Exchange:
    """The exchange that an array takes part in."""
    on = task.on
    matrices = task.on.matrices
    height, width = sorted(matrices.shape)
    across = _bound(matrices, matrices.sides)
    between = _bound(matrices, matrices.stack)
    manual = getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ())
    others = sorted({*manual} - {*across, *between})
    # If neither specs nor types say what differs, each device may train a different network.
    copies = [
        axis
        for axis in others
        if matrices.specs_known or norms.varying_axes(jax.lax.axis_index(axis))
    ]
    given = task.array.dtype
    return Exchange(
        on.function,
        shape=(height, width),
        dtype=norms.dtype_like(given, on.dtype or given),
        across=across,
        copies=splitting(copies),
        splits=on.splits,
    )


def _bound(matrices: Matrices, axes: Sequence[int]) -> tuple[str, ...]:
    """The mesh axes that split some axes here, in order."""
    names = {name for axis in axes for name in matrices.sharding.mesh_axes[axis]}
    return tuple(sorted(splitting(names)))


def _mesh_of_types(tasks: Tasks) -> jax.sharding.AbstractMesh | None:
    """The mesh that splits arrays by their types, outside of `jax.shard_map`.

    A mesh of one device does so, too, if its axes are explicit.
    """
    for task in tasks.values():
        mesh = jax.typeof(task.array).sharding.mesh
        splits = mesh.size > 1 or any(norms.explicit_spec(task.array))
        if splits and AxisType.Manual not in mesh.axis_types:
            return mesh
    return None


def _warn_if_specs_are_unknown(
    tasks: Tasks,
    mesh: jax.sharding.AbstractMesh,
) -> None:
    """Warns on an automatic mesh of several axes, where the compiler may gather whole matrices.

    It does so if several mesh axes split one axis of an array; types do not say if they do.
    """
    axes = [name for name, size in mesh.shape.items() if size > 1]
    specs_known = all(task.on.matrices.specs_known for task in tasks.values())
    if len(axes) < 2 or specs_known or AxisType.Explicit in mesh.axis_types:
        return
    warnings.warn(
        f"The update works on whole matrices on a mesh with the axes {', '.join(map(repr, axes))}, "
        "and does not know how the parameters are split. If several of these axes split one axis "
        "of a parameter, the compiler gathers matrices on every device, which takes many times the "
        "memory. Pass the specs by with_partition_specs(optimizer, specs), or by "
        "optimizer.update(grads, state, params, partition_specs=specs).",
        stacklevel=2,
    )


def _by_the_compiler(
    tasks: Tasks,
    mesh: jax.sharding.AbstractMesh,
) -> dict[Any, jax.Array]:
    """The results for arrays on an automatic mesh: only the compiler knows how they are split.

    It is asked to put whole matrices on each device, and uses all-to-alls for that.
    """
    results: dict[Any, jax.Array] = {}
    stacks = {key: task.to_batch() for key, task in tasks.items()}
    alike: dict[Any, list[Any]] = {}
    for key, x in stacks.items():
        # A stack that all devices can share equally may be split between its layers already.
        alone = key if len(x) % mesh.size == 0 else None
        kind = tasks[key].on.function, x.shape[1:], x.dtype, alone
        alike.setdefault(kind, []).append(key)
    # One mesh axis after the other: XLA knows no all-to-all for several, and would gather.
    names = mesh.axis_names
    free = PartitionSpec.UNCONSTRAINED
    specs = [PartitionSpec(names[: k + 1], free, free) for k in range(len(names))]
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    for keys in alike.values():
        some = [stacks[key] for key in keys]  # say, (layers=12, rows=768, columns=3072)
        first = some[0]
        padding = -sum(map(len, some)) % mesh.size
        zeros = jnp.zeros((padding, *first.shape[1:]), first.dtype)
        matrices = jnp.concatenate([*some, zeros])  # (16, 768, 3072) for 8 devices
        for sharding in shardings:
            matrices = jax.lax.with_sharding_constraint(matrices, sharding)
        matrices = jax.vmap(tasks[keys[0]].apply)(matrices)
        for sharding in reversed(shardings):
            matrices = jax.lax.with_sharding_constraint(matrices, sharding)
        if len(matrices) > len(first) and mesh.size not in mesh.shape.values():
            # XLA may slice wrongly along an axis that several mesh axes split, and then its
            # verifier refuses the program ("limit index (8) must be less than or equal to ...").
            by_rows = mesh.axis_names if matrices.shape[1] % mesh.size == 0 else None
            whole = NamedSharding(mesh, PartitionSpec(None, by_rows))
            matrices = jax.lax.with_sharding_constraint(matrices, whole)
        for key, stack in zip(keys, some, strict=True):
            results[key] = tasks[key].from_batch(matrices[: len(stack)])
            matrices = matrices[len(stack) :]
    return results


def _by_their_types(
    tasks: Tasks,
    following: Any,
    mesh: jax.sharding.AbstractMesh,
    side_by_side: bool,
) -> tuple[dict[Any, jax.Array], Any]:
    """The results for arrays on a mesh of explicit axes, on the shards of each device."""

    def on_one_device(
        arrays: Any,
        numbers: Any,
        following: Any,
    ) -> tuple[Any, Any]:
        on_shards = {
            key: EachMatrix(arrays[key], numbers[key], _with_spec_of(task))
            for key, task in tasks.items()
        }
        return apply_to_matrices(on_shards, following, side_by_side)

    arrays = {key: task.array for key, task in tasks.items()}
    numbers = {key: task.numbers for key, task in tasks.items()}
    specs = jax.tree.map(norms.explicit_spec, arrays)
    of_following = jax.tree.map(norms.explicit_spec, following)
    return jax.shard_map(
        on_one_device,
        mesh=mesh,
        in_specs=(specs, PartitionSpec(), of_following),
        out_specs=(specs, of_following),
        check_vma=False,
    )(arrays, numbers, following)


def _with_spec_of(task: EachMatrix) -> MatrixFunction:
    """The function of a task, for an array whose type says how it is split."""
    on = task.on
    names = tuple(map(mesh_axes, norms.explicit_spec(task.array)))
    sharding = on.matrices.sharding._replace(mesh_axes=names)
    matrices = on.matrices._replace(sharding=sharding, specs_known=True)
    return on._replace(matrices=matrices)
