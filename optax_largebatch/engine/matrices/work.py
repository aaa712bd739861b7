"""Work on whole matrices, wherever their parts are.

What is split by rows or columns is exchanged (`exchange.py`). A stack that is split between its
layers does not move. If nobody says how leaves are split but their types know the mesh, the
compiler is asked for the same.
"""

from collections.abc import Mapping, Sequence
import functools
import itertools
import math
from typing import Any, TypeVar
import warnings

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optax_largebatch import norms
from optax_largebatch.engine.compilation import barrier
from optax_largebatch.engine.matrices.cuts import Cut, Exchange, cut_of, shared
from optax_largebatch.engine.matrices.exchange import Trip, Work, each
from optax_largebatch.engine.requests import OnMatrices
from optax_largebatch.params.leaves import mesh_axes
from optax_largebatch.params.matrices import Matrices

Key = TypeVar("Key")
Following = TypeVar("Following")


def turns(asked: Mapping[Key, Work]) -> list[list[Key]]:
    """Groups of arrays whose matrices are exchanged and worked on together, in order.

    First those that move, since other work can hide their trips. Where nothing moves each array is
    a group, the large ones first: results pile up, and the work on a small one needs less besides.
    """
    exchanges: dict[Exchange, dict[Key, Work]] = {}
    for key, work in asked.items():
        exchanges.setdefault(_exchange(work.array, work.on), {})[key] = work
    mesh = _mesh_of_types(asked)
    if mesh is not None:
        _warn_if_nobody_says_how_they_are_split(asked, mesh)
        return [list(own) for own in exchanges.values()]
    moving: list[list[Key]] = []
    staying: list[Key] = []
    for exchange, own in exchanges.items():
        if exchange.moves:
            moving += _turns_of(exchange, own)
        else:
            staying += own
    staying.sort(key=lambda key: -asked[key].array.size)
    return [*moving, *([key] for key in staying)]


def _turns_of(exchange: Exchange, asked: Mapping[Key, Work]) -> list[list[Key]]:
    """Groups of the arrays of one exchange.

    A device that gets matrices which are cut in two ways looks at each of them in both ways, and
    needs memory for both. So matrices that are cut alike are a group of their own, if their number
    can be divided between all devices (or groups of them, at the same cost).
    """
    alike: dict[Cut, list[Key]] = {}
    numbers: dict[Cut, int] = {}
    for key, (x, _, on) in asked.items():
        cut = cut_of(x, on.matrices)
        alike.setdefault(cut, []).append(key)
        numbers[cut] = numbers.get(cut, 0) + x.size // math.prod(cut.lengths)
    apart = [shared(exchange, {cut: number}) for cut, number in numbers.items()]
    is_cheap = sum(way.cost for way in apart) <= shared(exchange, numbers).cost
    if is_cheap and not any(way.missing for way in apart):
        return list(alike.values())
    return [list(asked)]


def worked_on(
    asked: Mapping[Key, Work], following: Following = ()
) -> tuple[dict[Key, jax.Array], Following]:
    """The results for the matrices of several arrays, each by its function.

    Args:
        asked: the arrays of one turn, and the work on them.
        following: the arrays that the next turn starts from. They wait until the matrices of this
            turn have arrived, or until the work on them is done where nothing moves; otherwise all
            turns would be in memory at once. So the next matrices travel during this work.

    Returns:
        The results, and `following`.
    """
    mesh = _mesh_of_types(asked)
    if mesh is not None and AxisType.Explicit in mesh.axis_types:
        return _by_their_types(asked, following, mesh)
    if mesh is not None:
        return barrier((_spread(asked, mesh), following))
    moving: dict[Exchange, dict[Key, Work]] = {}
    for key, work in asked.items():
        own = _exchange(work.array, work.on)
        if own.moves:
            moving.setdefault(own, {})[key] = work
    trips = list(itertools.starmap(Trip, moving.items()))
    arrived = [trip.arrived() for trip in trips]
    if trips:
        arrived, following = barrier((arrived, following))
    results: dict[Key, jax.Array] = {}
    for trip, parts in zip(trips, arrived, strict=True):
        results |= trip.results(parts)
    results |= {key: _here(work) for key, work in asked.items() if key not in results}
    if not trips and jax.tree.leaves(following):
        results, following = barrier((results, following))
    return {key: results[key] for key in asked}, following


def _here(work: Work) -> jax.Array:
    """The matrices of a leaf that is whole, or split between matrices only."""
    x, _, on = work
    return on.matrices.back(each(work.function, on.matrices.apart(x)), x.shape)


def _exchange(x: jax.Array, on: OnMatrices) -> Exchange:
    """The exchange that an array takes part in."""
    height, width = sorted(on.matrices.shape)
    across = _bound(on.matrices, (*on.matrices.rows, *on.matrices.columns))
    between = _bound(on.matrices, on.matrices.stack)
    manual = getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ())
    others = sorted({*manual} - {*across, *between})
    copies = [x for x in others if on.matrices.is_told or _is_in_types(x)]
    copies = tuple(name for name in copies if norms.devices_along((name,)) > 1)
    dtype = jnp.dtype(on.dtype or x.dtype)
    return Exchange(on.function, (height, width), dtype, across, copies, on.splits)


def _is_in_types(axis: str) -> bool:
    """Whether types say what differs along a mesh axis.

    Where types do not say it, each device may train a network of its own.
    """
    return bool(norms.varying_axes(jax.lax.axis_index(axis)))


def _bound(matrices: Matrices, axes: Sequence[int]) -> tuple[str, ...]:
    """The mesh axes along which some axes are split here, in order."""
    names = {name for axis in axes for name in matrices.layout.mesh_axes[axis]}
    return tuple(sorted(name for name in names if norms.is_bound(name)))


def _mesh_of_types(asked: Mapping[Key, Work]) -> jax.sharding.AbstractMesh | None:
    """The mesh that splits arrays by their types, outside of `jax.shard_map`.

    A mesh of one device does so, too, if its axes are explicit.
    """
    for x, *_ in asked.values():
        mesh = jax.typeof(x).sharding.mesh
        splits = mesh.size > 1 or any(norms.explicit_spec(x))
        if splits and AxisType.Manual not in mesh.axis_types:
            return mesh
    return None


def _warn_if_nobody_says_how_they_are_split(
    asked: Mapping[Key, Work], mesh: jax.sharding.AbstractMesh
) -> None:
    """Warns on an automatic mesh of several axes, where the compiler may gather whole matrices.

    It does so if one axis of an array is split along several mesh axes; types do not say that.
    """
    axes = [name for name, size in mesh.shape.items() if size > 1]
    is_told = all(on.matrices.is_told for *_, on in asked.values())
    if len(axes) < 2 or is_told or AxisType.Explicit in mesh.axis_types:
        return
    warnings.warn(
        f"The update works on whole matrices on a mesh with the axes {', '.join(map(repr, axes))}, "
        "and does not know how the parameters are split. If several of these axes split one axis "
        "of a parameter, the compiler gathers matrices on every device, which takes many times the "
        "memory. Pass the specs where you build the optimizer, with_partition_specs(optimizer, "
        "specs), or where you call it, optimizer.update(grads, state, params, "
        "partition_specs=specs).",
        stacklevel=2,
    )


def _spread(asked: Mapping[Key, Work], mesh: jax.sharding.AbstractMesh) -> dict[Key, jax.Array]:
    """The results for arrays of which only the compiler knows how they are split.

    The compiler is told to put whole matrices on each device, and uses all-to-alls for that.
    """
    results: dict[Key, jax.Array] = {}
    apart_of = {key: on.matrices.apart(x) for key, (x, _, on) in asked.items()}
    alike: dict[Any, list[Key]] = {}
    for key, x in apart_of.items():
        # A stack with some for each device goes alone: it may be split between its layers already.
        alone = key if len(x) % mesh.size == 0 else None
        alike.setdefault((asked[key].on.function, x.shape[1:], x.dtype, alone), []).append(key)
    # One mesh axis after the other: XLA knows no all-to-all for several, and would gather.
    names, free = mesh.axis_names, PartitionSpec.UNCONSTRAINED
    steps = [PartitionSpec(names[: k + 1], free, free) for k in range(len(names))]
    trip = [NamedSharding(mesh, spec) for spec in steps]
    for keys in alike.values():
        apart = [apart_of[key] for key in keys]
        number = sum(map(len, apart))
        zeros = jnp.zeros((-number % mesh.size, *apart[0].shape[1:]), apart[0].dtype)
        matrices = jnp.concatenate([*apart, zeros])
        matrices = functools.reduce(jax.lax.with_sharding_constraint, trip, matrices)
        done = jax.vmap(asked[keys[0]].function)(matrices)
        matrices = functools.reduce(jax.lax.with_sharding_constraint, trip[::-1], done)
        if len(matrices) > len(apart[0]) and mesh.size not in mesh.shape.values():
            # XLA may cut wrongly along an axis that is split over several mesh axes, and then its
            # verifier refuses the program ("limit index (8) must be less than or equal to ...").
            by_rows = mesh.axis_names if matrices.shape[1] % mesh.size == 0 else None
            whole = NamedSharding(mesh, PartitionSpec(None, by_rows))
            matrices = jax.lax.with_sharding_constraint(matrices, whole)
        for key, own in zip(keys, apart, strict=True):
            x, _, on = asked[key]
            results[key] = on.matrices.back(matrices[: len(own)], x.shape)
            matrices = matrices[len(own) :]
    return results


def _by_its_type(x: jax.Array, on: OnMatrices) -> OnMatrices:
    """The same work, for an array whose type says how it is split."""
    spec = norms.explicit_spec(x)
    names = tuple(mesh_axes(entry) for entry in (*spec, *[None] * x.ndim)[: x.ndim])
    layout = on.matrices.layout._replace(mesh_axes=names)
    return on._replace(matrices=on.matrices._replace(layout=layout, is_told=True))


def _by_their_types(
    asked: Mapping[Key, Work], following: Following, mesh: jax.sharding.AbstractMesh
) -> tuple[dict[Key, jax.Array], Following]:
    """The results for arrays on a mesh of explicit axes, on the shards of each device."""
    specs = {key: norms.explicit_spec(x) for key, (x, *_) in asked.items()}
    on_shards = {key: _by_its_type(x, on) for key, (x, _, on) in asked.items()}

    def on_one_device(
        arrays: dict[Key, jax.Array],
        numbers: dict[Key, Sequence[jax.Array]],
        following: Following,
    ) -> tuple[dict[Key, jax.Array], Following]:
        works = {key: Work(x, numbers[key], on_shards[key]) for key, x in arrays.items()}
        return worked_on(works, following)

    arrays = {key: x for key, (x, *_) in asked.items()}
    numbers = {key: own for key, (_, own, _) in asked.items()}
    own = jax.tree.map(norms.explicit_spec, following)
    return jax.shard_map(
        on_one_device,
        mesh=mesh,
        in_specs=(specs, PartitionSpec(), own),
        out_specs=(specs, own),
        check_vma=False,
    )(arrays, numbers, following)
