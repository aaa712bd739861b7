"""Work on whole matrices whose parts are on several devices.

Nothing is gathered. Matrices of one shape, of all leaves and of all layers of stacks, are shared
out: each device gives away its parts of all of them and gets all parts of some, in one all-to-all.
Each device works on its matrices, and the parts travel back in a second all-to-all. A stack that is
split between its layers does not move. Devices that are known to have copies of the same parts
share the work, and tell each other the results. If there are fewer matrices than devices, some
devices work on zeros.
"""

from collections.abc import Callable, Mapping, Sequence
import itertools
import math
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
import numpy as np

from optax_largebatch import norms
from optax_largebatch.engine.tracing import OnMatrices
from optax_largebatch.params.leaves import mesh_axes
from optax_largebatch.params.matrices import Matrices

AT_A_TIME = 2**22
"""The number of elements from which products of matrices fill a device."""

Key = TypeVar("Key")


class Work(NamedTuple):
    """An array, and the work on its matrices."""

    array: jax.Array
    numbers: Sequence[jax.Array]
    """What the function is given after its matrix."""
    on: OnMatrices

    def function(self, matrix: jax.Array) -> jax.Array:
        """The result for a matrix."""
        return self.on.function(matrix, *self.numbers)


class Exchange(NamedTuple):
    """What the matrices of one exchange have in common."""

    function: Callable[..., jax.Array]
    shape: tuple[int, ...]
    """The sides of a matrix, the shorter one first."""
    dtype: jnp.dtype
    across: tuple[str, ...]
    """The mesh axes along which each matrix is split."""
    copies: tuple[str, ...]
    """The mesh axes along which all devices have the same matrices."""


class Cut(NamedTuple):
    """How a matrix is cut into the parts that devices have."""

    lengths: tuple[int, ...]
    """Lengths of a part, along the axes of its rows and those of its columns."""
    names: tuple[tuple[str, ...], ...]
    """The mesh axes that cut each axis."""
    turned: int
    """How many axes come last in the exchange, where a high matrix lies on its long side."""

    def joined(self, parts: jax.Array, exchange: Exchange) -> jax.Array:
        """Matrices from their parts: (devices, matrices, elements) to (matrices, rows, columns)."""
        sizes, order = self._order(exchange)
        x = parts.reshape(*sizes, parts.shape[1], *self.lengths)
        return jnp.transpose(x, order).reshape(parts.shape[1], *exchange.shape)

    def apart(self, matrices: jax.Array, exchange: Exchange) -> jax.Array:
        """The parts of matrices; the reverse of `joined`."""
        sizes, order = self._order(exchange)
        lengths = (*sizes, matrices.shape[0], *self.lengths)
        x = matrices.reshape([lengths[axis] for axis in order])
        x = jnp.transpose(x, np.argsort(order).tolist())
        devices = norms.devices_along(exchange.across)
        return x.reshape(devices, matrices.shape[0], math.prod(self.lengths))

    def _order(self, exchange: Exchange) -> tuple[list[int], list[int]]:
        """The lengths of the mesh axes, and where each axis stands in a whole matrix."""
        across = exchange.across
        whole = [
            [*map(across.index, names), axis]
            for axis, names in enumerate(self.names, len(across) + 1)
        ]
        whole = [*whole[self.turned :], *whole[: self.turned]]
        return [norms.devices_along((x,)) for x in across], [len(across), *itertools.chain(*whole)]


class Share(NamedTuple):
    """Matrices of an exchange that are cut alike."""

    cut: Cut
    first: int
    last: int
    """The number of the first matrix, and of the one after the last."""


def turns(asked: Mapping[Key, Work]) -> list[list[Key]]:
    """Groups of arrays whose matrices are exchanged and worked on together."""
    exchanges: dict[Exchange, list[Key]] = {}
    for key, (x, _, on) in asked.items():
        exchanges.setdefault(_exchange(x, on), []).append(key)
    if _mesh_of_types(asked) is not None:
        return list(exchanges.values())
    return list(
        itertools.chain.from_iterable(
            _turns_of(own, {key: asked[key] for key in keys}) for own, keys in exchanges.items()
        )
    )


def _turns_of(exchange: Exchange, asked: Mapping[Key, Work]) -> list[list[Key]]:
    """Groups of the arrays of one exchange; where nothing moves, each array is a group.

    A device that gets matrices which are cut in two ways looks at each of them in both ways, and
    needs memory for both. So matrices that are cut alike are a group of their own, if their number
    can be divided between all devices.
    """
    devices = norms.devices_along((*exchange.across, *exchange.copies))
    if devices == 1:
        return [[key] for key in asked]
    alike: dict[Cut, list[Key]] = {}
    numbers: dict[Cut, int] = {}
    for key, (x, _, on) in asked.items():
        cut = _cut(x, on.matrices)
        alike.setdefault(cut, []).append(key)
        numbers[cut] = numbers.get(cut, 0) + x.size // math.prod(cut.lengths)
    if all(number % devices == 0 for number in numbers.values()):
        return list(alike.values())
    return [list(asked)]


def worked_on(asked: Mapping[Key, Work]) -> dict[Key, jax.Array]:
    """The results for the matrices of several arrays, each by its function."""
    mesh = _mesh_of_types(asked)
    if mesh is not None and AxisType.Explicit in mesh.axis_types:
        return _by_their_types(asked, mesh)
    if mesh is not None:
        return _spread(asked, mesh)
    results: dict[Key, jax.Array] = {}
    exchanges: dict[Exchange, list[Key]] = {}
    for key, work in asked.items():
        own = _exchange(work.array, work.on)
        if own.across or own.copies:
            exchanges.setdefault(own, []).append(key)
        else:
            results[key] = _here(work)
    for exchange, keys in exchanges.items():
        results |= _exchanged(exchange, {key: asked[key] for key in keys})
    return {key: results[key] for key in asked}


def _here(work: Work) -> jax.Array:
    """The matrices of a leaf that is whole, or split between matrices only."""
    x, _, on = work
    return on.matrices.back(_each(work.function, on.matrices.apart(x)), x.shape)


def _each(function: Callable[[jax.Array], jax.Array], matrices: jax.Array) -> jax.Array:
    """A function of each matrix, on as many at a time as fill a device.

    Each result is written over its matrix, so that little memory is taken besides.
    """
    number, height, width = matrices.shape
    together = max(AT_A_TIME // max(height * width, 1), 1)
    of_several = jax.vmap(function)
    if number <= together:
        return function(matrices[0])[None] if number == 1 else of_several(matrices)
    whole = number // together

    def step(turn: Any, matrices: jax.Array) -> jax.Array:
        own = jax.lax.dynamic_slice_in_dim(matrices, turn * together, together)
        return jax.lax.dynamic_update_slice_in_dim(matrices, of_several(own), turn * together, 0)

    matrices = jax.lax.fori_loop(0, whole, step, matrices)
    rest = matrices[whole * together :]
    return matrices.at[whole * together :].set(of_several(rest)) if len(rest) else matrices


def _exchange(x: jax.Array, on: OnMatrices) -> Exchange:
    """The exchange that an array takes part in."""
    height, width = sorted(on.matrices.shape)
    across = _bound(on.matrices, (*on.matrices.rows, *on.matrices.columns))
    between = _bound(on.matrices, on.matrices.stack)
    manual = getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ())
    others = sorted({*manual} - {*across, *between})
    copies = [x for x in others if on.matrices.is_told or _is_in_types(x)]
    copies = tuple(name for name in copies if norms.devices_along((name,)) > 1)
    return Exchange(on.function, (height, width), x.dtype, across, copies)


def _is_in_types(axis: str) -> bool:
    """Whether types say what differs along a mesh axis.

    Where types do not say it, each device may train a network of its own.
    """
    return bool(norms.varying_axes(jax.lax.axis_index(axis)))


def _bound(matrices: Matrices, axes: Sequence[int]) -> tuple[str, ...]:
    """The mesh axes along which some axes are split here, in order."""
    names = {name for axis in axes for name in matrices.layout.mesh_axes[axis]}
    return tuple(sorted(name for name in names if norms.is_bound(name)))


def _exchanged(exchange: Exchange, asked: Mapping[Key, Work]) -> dict[Key, jax.Array]:
    """The results for arrays of one exchange."""
    # Alike cuts follow each other, so that few devices have to look at matrices in two ways.
    columns = {k: (_cut(x, on.matrices), on.matrices.apart(x)) for k, (x, _, on) in asked.items()}
    keys = sorted(columns, key=lambda key: columns[key][0])
    units = [columns[key][1] for key in keys]
    units = [x.reshape(len(x), math.prod(x.shape[1:])) for x in units]
    shares: dict[Cut, Share] = {}
    ends: list[int] = []
    for key, own in zip(keys, units, strict=True):
        begin = ends[-1] if ends else 0
        ends.append(begin + len(own))
        cut = columns[key][0]
        first = shares[cut].first if cut in shares else begin
        shares[cut] = Share(cut, first, ends[-1])
    # With its numbers, which are the same for all leaves.
    exchange = exchange._replace(function=asked[keys[0]].function)
    done = _shared_out(exchange, jnp.concatenate(units), list(shares.values()))
    results = {}
    for key, end, own in zip(keys, ends, units, strict=True):
        x, _, on = asked[key]
        results[key] = on.matrices.back(done[end - len(own) : end], x.shape)
    return results


def _cut(x: jax.Array, matrices: Matrices) -> Cut:
    """How the matrices of an array are cut."""
    axes = (*matrices.rows, *matrices.columns)
    names = [tuple(filter(norms.is_bound, matrices.layout.mesh_axes[axis])) for axis in axes]
    height, width = matrices.shape
    turned = len(matrices.rows) if height > width else 0
    return Cut(tuple(x.shape[axis] for axis in axes), tuple(names), turned)


def _shared_out(exchange: Exchange, parts: jax.Array, shares: Sequence[Share]) -> jax.Array:
    """The parts of the results, from the parts of matrices: (matrices, elements of a part).

    Matrix `i` is worked on by device `i % devices`, those with copies counted, so that a device
    works on few that are cut otherwise than those of its neighbours.
    """
    across, copies = exchange.across, exchange.copies
    devices, of_copies = norms.devices_along(across), norms.devices_along(copies)
    number, elements = parts.shape
    turns = -(-number // (devices * of_copies))
    padded = jnp.pad(parts, ((0, turns * devices * of_copies - number), (0, 0)))
    own = padded.reshape(turns, of_copies, devices, elements).transpose(1, 2, 0, 3)
    place = jax.lax.axis_index(across) if across else 0
    copy = jax.lax.axis_index(copies) if copies else 0
    own = jax.lax.dynamic_index_in_dim(own, copy, keepdims=False) if copies else own[0]
    if across:
        own = jax.lax.all_to_all(own, across, 0, 0)
    mine = (jnp.arange(turns, dtype=jnp.int32) * of_copies + copy) * devices + place

    def one_of_ways(ways: Sequence[jax.Array], axis: int) -> jax.Array:
        """For each matrix the way in which it is cut."""
        result = ways[0]
        for share, way in zip(shares[1:], ways[1:], strict=True):
            is_own = (mine >= share.first) & (mine < share.last)
            shape = [turns if k == axis else 1 for k in range(result.ndim)]
            result = jnp.where(is_own.reshape(shape), way, result)
        return result

    matrices = one_of_ways([x.cut.joined(own, exchange) for x in shares], 0)
    matrices = _each(exchange.function, matrices)
    own = one_of_ways([x.cut.apart(matrices, exchange) for x in shares], 1)
    if across:
        own = jax.lax.all_to_all(own, across, 0, 0)
    all_own = norms.gathered(own[None], 0, copies) if copies else own[None]
    done = all_own.transpose(2, 0, 1, 3).reshape(turns * of_copies * devices, elements)
    return done[:number]


def _mesh_of_types(asked: Mapping[Key, Work]) -> jax.sharding.AbstractMesh | None:
    """The mesh of several devices that the types of arrays know, outside of `jax.shard_map`."""
    for x, *_ in asked.values():
        mesh = jax.typeof(x).sharding.mesh
        if mesh.size > 1 and AxisType.Manual not in mesh.axis_types:
            return mesh
    return None


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
    some_each = jax.sharding.NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    for keys in alike.values():
        apart = [apart_of[key] for key in keys]
        number = sum(map(len, apart))
        zeros = jnp.zeros((-number % mesh.size, *apart[0].shape[1:]), apart[0].dtype)
        matrices = jnp.concatenate([*apart, zeros])
        matrices = jax.lax.with_sharding_constraint(matrices, some_each)
        done = jax.vmap(asked[keys[0]].function)(matrices)
        matrices = jax.lax.with_sharding_constraint(done, some_each)
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
    asked: Mapping[Key, Work], mesh: jax.sharding.AbstractMesh
) -> dict[Key, jax.Array]:
    """The results for arrays on a mesh of explicit axes, on the shards of each device."""
    specs = {key: norms.explicit_spec(x) for key, (x, *_) in asked.items()}
    on_shards = {key: _by_its_type(x, on) for key, (x, _, on) in asked.items()}

    def on_one_device(
        arrays: dict[Key, jax.Array], numbers: dict[Key, Sequence[jax.Array]]
    ) -> dict[Key, jax.Array]:
        return worked_on({key: Work(x, numbers[key], on_shards[key]) for key, x in arrays.items()})

    arrays = {key: x for key, (x, *_) in asked.items()}
    numbers = {key: own for key, (_, own, _) in asked.items()}
    return jax.shard_map(
        on_one_device,
        mesh=mesh,
        in_specs=(specs, PartitionSpec()),
        out_specs=specs,
        check_vma=False,
    )(arrays, numbers)
