"""Sums and norms of blocks. All norms of this library are computed here.

A *block* has one norm: it is a leaf of the parameter tree, or a slice of a leaf that stacks several
layers. Under `jit` a sharded leaf is still one array, and the compiler adds up its shards. Inside
`jax.shard_map` and `jax.pmap` a leaf is a shard, and its sums are added up here.
"""

from collections.abc import Iterable, Sequence
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from optax_largebatch.arguments import quoted

WIDE = frozenset(map(jnp.dtype, ("float64", "complex128")))
"""What is accumulated in 64 bits."""


@functools.lru_cache(256)
def accumulation_dtype(*dtypes: jax.typing.DTypeLike) -> jnp.dtype:
    """The dtype of norms and moments: float32, or float64 if one of `dtypes` is as precise."""
    is_wide = not WIDE.isdisjoint([jnp.dtype(x) for x in dtypes])
    return jnp.dtype(jnp.float64 if is_wide else jnp.float32)


def dtype_like(
    like: jax.typing.DTypeLike,
    dtype: jax.typing.DTypeLike | None = None,
) -> jnp.dtype:
    """`dtype`, or if that is None, the accumulation dtype of `like`.

    If `like` is complex, so is the result. It is as precise as `dtype` then, or more: there are no
    short complex numbers.
    """
    dtype = jnp.dtype(dtype or accumulation_dtype(like))
    if not jnp.issubdtype(like, jnp.complexfloating):
        return dtype
    return np.result_type(accumulation_dtype(dtype), np.complex64)


def cast(x: Any, dtype: jax.typing.DTypeLike | None = None) -> Any:
    """An array, or a `jax.ShapeDtypeStruct` for one, in `dtype_like` of its dtype."""
    if dtype is None or jnp.iscomplexobj(x):
        dtype = dtype_like(x.dtype, dtype)
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)
    return jnp.asarray(x, dtype)


def square(x: jax.Array) -> jax.Array:
    """The square of the size of each element."""
    return inner_terms(x, x) if jnp.iscomplexobj(x) else jnp.square(x)


def inner_terms(x: jax.Array, y: jax.Array) -> jax.Array:
    """The terms of the inner product of two arrays; of complex ones, of their real parts."""
    return x.real * y.real + x.imag * y.imag if jnp.iscomplexobj(x) else x * y


def block_sum(x: jax.Array, kept: tuple[int, ...] = ()) -> jax.Array:
    """The sum over all axes except `kept`, with a shape such as () or (layers, 1, 1).

    It is accumulated in float32 (float64 for a float64 leaf) whatever the leaf's dtype.
    """
    x = x.astype(accumulation_dtype(x.dtype))
    if not kept:
        return jnp.sum(x)
    return jnp.sum(x, axis=other_axes(x.ndim, kept), keepdims=True)


def shape_of_blocks(
    shape: tuple[int, ...],
    kept: tuple[int, ...],
) -> tuple[int, ...]:
    """The shape of the `block_sum` of an array of this shape."""
    if not kept:
        return ()
    return tuple([size if axis in kept else 1 for axis, size in enumerate(shape)])


def other_axes(ndim: int, axes: Iterable[int]) -> tuple[int, ...]:
    """The axes of an array that are not among `axes`."""
    return tuple(sorted({*range(ndim)}.difference(axes)))


def lengths_along(
    shape: Sequence[int],
    axes: Iterable[int],
) -> tuple[int, ...]:
    """The lengths of some axes of an array."""
    return tuple([shape[axis] for axis in axes])


def sum_of_squares(x: jax.Array, kept: tuple[int, ...] = ()) -> jax.Array:
    """`block_sum(abs(x)**2)`, cast before it is squared.

    A norm in float16 overflows at 65504, and one in bfloat16 has two digits. XLA fuses the cast
    into the reduction.
    """
    return block_sum(square(cast(x)), kept)


class Split(NamedTuple):
    """How the mesh axes of a surrounding `jax.shard_map` or `jax.pmap` split a leaf."""

    within: frozenset[str] = frozenset()
    """Axes that split blocks: each device has a part of every block."""
    between: frozenset[str] = frozenset()
    """Axes that split a stack between its blocks: each device has some whole blocks."""


def is_bound(axis: str) -> bool:
    """Whether the code is inside a `jax.shard_map` or `jax.pmap` over this mesh axis."""
    try:
        jax.lax.axis_index(axis)
    except NameError:
        return False
    return True


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The mesh axes of a surrounding `jax.shard_map` along which `x` differs between devices.

    The array's type has them, unless `check_vma=False`. Outside of `shard_map` there are none.
    """
    kind = jax.typeof(x)
    manual = getattr(kind, "manual_axis_type", None)  # before jax 0.10: `vma`
    return getattr(kind, "vma", frozenset()) if manual is None else manual.varying


def check_same_everywhere(name: str, value: Any, remedy: str) -> None:
    """Checks that an extra argument of `update` is the same on all devices, as far as types say.

    Raises:
        ValueError: it differs between the devices of a surrounding `jax.shard_map`.
    """
    axes = varying_axes(value) if isinstance(value, jax.Array) else None
    if axes:
        raise ValueError(
            f"{name} must be the same on all devices; it differs along the mesh axes "
            f"{quoted(axes)}. {remedy}"
        )


def over_shards(
    sums: Sequence[jax.Array],
    splits: Sequence[Split],
) -> list[jax.Array]:
    """Sums over whole blocks, from the sums over the shards of each device.

    All sums travel as one vector, in one reduction. Stacks that are split between their blocks take
    a second one, because their blocks must not be added to each other.
    """
    whole = list(sums)
    # Not in the order of a set, which differs between the processes of one run.
    for between in dict.fromkeys([split.between for split in splits]):
        alike = [k for k, x in enumerate(splits) if x.within and x.between == between]
        if not alike:
            continue
        axes = frozenset[str]().union(*[splits[k].within for k in alike])
        dtype = accumulation_dtype(*[sums[k].dtype for k in alike])
        terms = []
        for k in alike:
            x = jnp.ravel(sums[k]).astype(dtype)
            terms.append(_counted_once(x, axes - splits[k].within))
        vector = jax.lax.psum(jnp.concatenate(terms), tuple(sorted(axes)))
        stop = 0
        for k in alike:
            like = sums[k]
            start = stop
            stop += like.size
            whole[k] = vector[start:stop].reshape(like.shape).astype(like.dtype)
    return whole


def _counted_once(x: jax.Array, repeated: frozenset[str]) -> jax.Array:
    """A sum that is equal along mesh axes, in a vector that is summed along them.

    The first device along these axes keeps it; the others add zero.
    """
    for axis in sorted(repeated):
        x = jnp.where(jax.lax.axis_index(axis) == 0, x, 0)
    return x


def placed(x: jax.Array, axis: int, mesh_axes: tuple[str, ...]) -> jax.Array:
    """A shard of an array that is split along `axis`, at its position in a whole array of zeros.

    Outside of `jax.shard_map` the array is whole already, whatever the mesh axes.
    """
    if not any(map(is_bound, mesh_axes)):
        return with_spec(x, PartitionSpec())
    shape = list(x.shape)
    shape[axis] *= devices_along(mesh_axes)
    start = jax.lax.axis_index(mesh_axes) * x.shape[axis]
    zeros = jnp.zeros(shape, x.dtype)
    return jax.lax.dynamic_update_slice_in_dim(zeros, x, start, axis)


def gathered(x: jax.Array, axis: int, mesh_axes: tuple[str, ...]) -> jax.Array:
    """The whole of an array that is split along `axis`, the same on all devices."""
    whole = placed(x, axis, mesh_axes)
    return jax.lax.psum(whole, mesh_axes) if any(map(is_bound, mesh_axes)) else whole


def local_shard(
    x: jax.Array,
    axis: int,
    mesh_axes: tuple[str, ...],
) -> jax.Array:
    """This device's shard of a whole array: the reverse of `gathered`."""
    if not any(map(is_bound, mesh_axes)):
        return x
    size = x.shape[axis] // devices_along(mesh_axes)
    start = jax.lax.axis_index(mesh_axes) * size
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def devices_along(mesh_axes: Iterable[str]) -> int:
    """The number of devices along mesh axes of a surrounding `jax.shard_map`, 1 without axes."""
    return jax.lax.psum(1, tuple(sorted(mesh_axes)))


def explicit_spec(x: jax.Array) -> PartitionSpec:
    """The `PartitionSpec` in the type of an array, on a mesh with explicit axes."""
    return jax.typeof(x).sharding.spec


def is_on_a_mesh(arrays: Any) -> bool:
    """Whether the types of some arrays say that they are on several devices.

    They do not if only `in_shardings` say so, nor in jax before 0.10. Then the lowering knows it.
    """
    for x in jax.tree.leaves(arrays):
        sharding = jax.typeof(x).sharding
        if sharding.mesh.size > 1 or any(sharding.spec) or varying_axes(x):
            return True
    return False


def with_spec(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """The array split as `spec` says, unchanged if neither it nor its type has a mesh axis."""
    if not any(explicit_spec(x)) and not any(spec):
        return x
    mesh = jax.typeof(x).sharding.mesh
    return jax.sharding.reshard(x, spec if mesh.empty else NamedSharding(mesh, spec))


def everywhere(
    flags: Sequence[jax.Array],
    splits: Sequence[Split],
) -> jax.Array:
    """Whether some booleans, one for each leaf's part on a device, are true on all devices."""
    hold = jnp.all(jnp.stack(list(flags))) if flags else jnp.ones([], bool)
    axes = {axis for split in splits for axis in split.within | split.between}
    if not axes:
        return hold
    devices_without = jax.lax.psum(jnp.where(hold, 0, 1), tuple(sorted(axes)))
    return devices_without == 0


def total(sums: Sequence[jax.Array]) -> jax.Array:
    """The sum over several blocks, from the sum of each, in the widest of their dtypes."""
    dtype = accumulation_dtype(*[x.dtype for x in sums])
    return jnp.sum(jnp.stack([x.astype(dtype) for x in sums]))


@jax.custom_jvp
def from_sum_of_squares(square: jax.Array) -> jax.Array:
    """The L2 norm. Its derivative at 0 is 0, so that updates can be differentiated."""
    return jnp.sqrt(square)


@from_sum_of_squares.defjvp
def _derivative_of_norm(
    primals: tuple[jax.Array],
    tangents: tuple[jax.Array],
) -> tuple[jax.Array, jax.Array]:
    norm = from_sum_of_squares(*primals)
    zero = norm == 0
    return norm, jnp.where(zero, 0, tangents[0] / jnp.where(zero, 1, 2 * norm))
