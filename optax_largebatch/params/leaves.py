"""The leaves of the trees in one update, checked against each other."""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import functools
import itertools
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from optax_largebatch import norms
from optax_largebatch.arguments import quoted
from optax_largebatch.params.paths import broadcast_prefix, has_placeholders, leaf_names
from optax_largebatch.params.shapes import Axes, Shape

MeshAxes = tuple[str, ...]
"""Some of the axes of a mesh."""


@dataclasses.dataclass(frozen=True)
class Leaves:
    """The parameters of an update; `tree` gives the structure and the order.

    `tree` is the parameters, or the gradients where a transformation needs no parameters.
    """

    tree: Any
    treedef: Any
    arrays: list[Any]
    specs: list[PartitionSpec] | None = None
    """How the leaves are split between devices, if `update` is given that."""
    mesh: Any = None
    """The mesh of the specs under `jit`; None inside `jax.shard_map`, where each leaf is a shard
    already."""

    @functools.cached_property
    def names(self) -> list[str]:
        """The name of each leaf."""
        return leaf_names(self.tree)

    def align(self, name: str, tree: Any) -> list[Any]:
        """The parts of another tree at the places of these leaves (a part may be None)."""
        try:
            return self.treedef.flatten_up_to(tree)
        except ValueError as error:
            raise ValueError(
                f"{name} must have the tree structure of the parameters given to `init`: {error}"
            ) from None

    def alike(self, name: str, tree: Any) -> list[Any]:
        """The parts of another tree at the places of these leaves, after checking their shapes.

        Args:
            name: what the tree is, for messages.
            tree: the tree.

        Raises:
            ValueError: the tree has another structure, or an array another shape.
        """
        aligned = self.align(name, tree)
        for index, array in enumerate(aligned):
            shape = self.arrays[index].shape
            given = getattr(array, "shape", None)
            if given != shape:
                raise ValueError(
                    f"{name} has the shape {given} for the parameter {self.names[index]!r} of "
                    f"shape {shape}. It belongs to other parameters or options, or has an axis for "
                    "several models. Call `init` of this optimizer with these parameters, or "
                    "restore into what it returns."
                )
        return aligned

    def split(self, index: int, kept: Axes = ()) -> norms.Split:
        """How a leaf is split, if its blocks are the slices along the axes `kept`.

        Args:
            index: the leaf.
            kept: its stacked axes.

        Returns:
            The mesh axes.

        Raises:
            ValueError: the type of a stacked leaf says that it is split, but not along which axis.
        """
        varying = norms.varying_axes(self.arrays[index])
        if self.specs is None and not (kept and varying):
            return norms.Split(within=varying)
        if self.mesh is not None:  # arrays are whole
            return norms.Split()
        names = self.sharding(index, f"sums are taken along all axes but {kept}").mesh_axes
        between = frozenset(name for axis in kept for name in names[axis])
        within = frozenset(itertools.chain(*names)) - between
        return norms.Split(within, between)

    def axes_along(self, index: int, axis: int) -> MeshAxes:
        """The mesh axes along which `specs` splits one axis of a leaf."""
        spec = () if self.specs is None else self.specs[index]
        return mesh_axes(spec[axis]) if axis < len(spec) else ()

    def elements_of_block(self, index: int, kept: Axes = ()) -> int:
        """The number of elements of a block of a leaf, on all devices together."""
        array = self.arrays[index]
        axes = norms.other_axes(array.ndim, kept)
        devices = norms.devices_along(self.split(index, kept).within)
        return math.prod(norms.lengths_along(array.shape, axes)) * devices

    def sharding(self, index: int, who: str) -> "LeafSharding":
        """How the axes of a leaf are split, for transformations that work along axes.

        Args:
            index: the leaf.
            who: the transformation and what it does, for the message.

        Returns:
            Its whole shape and the mesh axes along each axis.

        Raises:
            ValueError: the type of a leaf says that it is split, but not along which axis.
        """
        array = self.arrays[index]
        varying = norms.varying_axes(array)
        if self.specs is None and varying:
            raise ValueError(
                f"partition_specs must be given to `update`, because {who}, and the type of "
                f"{self.names[index]!r}, which is split along {quoted(varying)}, does "
                "not say along which of its axes. Call optimizer.update(grads, state, params, "
                "partition_specs=specs) with the specs that shard_map has for the parameters."
            )
        if self.specs is None:
            return LeafSharding(array.shape, ((),) * array.ndim)
        names = tuple(self.axes_along(index, axis) for axis in range(array.ndim))
        here = names if self.mesh is None else ((),) * array.ndim
        lengths = map(norms.devices_along, here)
        return LeafSharding(tuple(map(operator.mul, array.shape, lengths)), names)

    def shardings(self, who: str) -> "list[LeafSharding]":
        """The `sharding` of each leaf."""
        return [self.sharding(index, who) for index in range(len(self.arrays))]

    def sum_of_squares(self, arrays: list[Any]) -> jax.Array:
        """The sum of the squares of all elements of arrays that are split like the leaves.

        Args:
            arrays: one for each leaf; None for one that does not count.
        """
        places = [i for i, x in enumerate(arrays) if x is not None]
        squares = [norms.sum_of_squares(arrays[i]) for i in places]
        whole = norms.over_shards(squares, list(map(self.split, places)))
        return norms.total(whole or [jnp.zeros([], jnp.float32)])

    def updates(self, tree: Any) -> list[Any]:
        """The updates of another transformation, each in the dtype of its parameter."""
        aligned = self.align("the updates", tree)
        return self.map(lambda update, param: update.astype(param.dtype), aligned)

    def map(
        self,
        function: Callable[[Any, Any], Any],
        arrays: Sequence[Any],
    ) -> list[Any]:
        """`function` of the array of each leaf and its parameter; None stays None."""
        pairs = zip(arrays, self.arrays, strict=True)
        return [None if x is None else function(x, param) for x, param in pairs]

    def rebuild(self, leaves: list[Any]) -> Any:
        """A tree of this structure."""
        return self.treedef.unflatten(leaves)


class LeafSharding(NamedTuple):
    """The axes of a leaf, which may be split between devices."""

    shape: Shape
    """The shape of the whole."""
    mesh_axes: tuple[MeshAxes, ...]
    """The mesh axes along which each of its axes is split."""

    def gathered(self, x: jax.Array) -> jax.Array:
        """The whole of an array like the leaf, the same on all devices.

        Args:
            x: this device's part of it.
        """
        for axis, names in enumerate(self.mesh_axes):
            x = norms.gathered(x, axis, names)
        return x

    def placed(self, x: jax.Array, axes: Iterable[int]) -> jax.Array:
        """A part of an array like the leaf, in its place in an array of zeros.

        The sum of all devices' is the whole, the same on all devices.

        Args:
            x: this device's part of it, or a term of that part.
            axes: the axes along which it is one.
        """
        for axis in axes:
            x = norms.placed(x, axis, self.mesh_axes[axis])
        return norms.with_spec(x, PartitionSpec())

    def local_shard(self, x: jax.Array) -> jax.Array:
        """This device's part of a whole array like the leaf; axes of length 1 are kept."""
        for axis, names in enumerate(self.mesh_axes):
            x = norms.local_shard(x, axis, names) if x.shape[axis] > 1 else x
        return x


def leaves_of(name: str, tree: Any) -> Leaves:
    """The leaves of `tree`, after checking that they can be optimized.

    Args:
        name: what the tree is, for messages.
        tree: parameters or gradients; for `init` also their `jax.ShapeDtypeStruct`.

    Returns:
        The leaves.

    Raises:
        TypeError: a leaf is no floating point or complex array.
        ValueError: `params` has no leaf at all (and no placeholder of optax).
    """
    if tree is None:
        raise ValueError(f"{name} must be a tree of arrays, got None.")
    leaves, treedef = jax.tree.flatten(tree)
    if name == "params" and not leaves and not has_placeholders(tree):
        raise ValueError(
            f"params must hold at least one array, got the empty tree {tree!r}. Pass the "
            "parameters themselves, for example variables['params'] or nnx.state(model, nnx.Param)."
        )
    for index, leaf in enumerate(leaves):
        dtype = getattr(leaf, "dtype", None)
        if isinstance(leaf, float):
            continue
        if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
            what = f"a leaf of type {type(leaf).__name__}" if dtype is None else f"dtype {dtype}"
            raise TypeError(
                f"{name} must hold floating point or complex arrays; {leaf_names(tree)[index]!r} "
                f"has {what}. Leave it out (equinox: eqx.filter(model, eqx.is_inexact_array)) or "
                "hide it with optax.masked."
            )
    arrays = [x if isinstance(x, jax.ShapeDtypeStruct) else jnp.asarray(x) for x in leaves]
    return Leaves(tree, treedef, arrays)


def gradients_of(
    updates: Any,
    params: Any,
    partition_specs: Any = None,
    *,
    name: str = "updates",
) -> tuple[Leaves, list[Any]]:
    """The leaves of an update, and the gradient of each leaf.

    Args:
        updates: the gradients; None may stand in the place of a leaf that has none.
        params: the parameters, or None.
        partition_specs: how the parameters are split: a tree of `PartitionSpec` or
            `NamedSharding`, or a prefix of one. With None, the array types decide inside
            `jax.shard_map`, and the compiler under `jit`.
        name: what the update is, for messages.

    Returns:
        The leaves of the parameters (of the gradients, if `params` is None), and the gradient of
        each leaf or None.

    Raises:
        TypeError: a parameter or gradient is no floating point or complex array, or one of the two
            is real and the other complex.
        ValueError: the two trees differ in structure or shapes; or, inside `jax.shard_map`, a
            gradient differs between devices where its parameter does not, or a parameter is not
            split as its spec says.
    """
    checked = leaves_of(name, updates)
    leaves = checked if params is None else leaves_of("params", params)
    leaves = _with_specs(leaves, partition_specs)
    gradients = leaves.align(name, updates)
    for index, gradient in enumerate(gradients):
        if gradient is not None:
            gradients[index] = jnp.asarray(gradient)
            _check_gradient(name, gradients[index], leaves, index)
    return leaves, gradients


def _check_gradient(
    name: str,
    gradient: jax.Array,
    leaves: Leaves,
    index: int,
) -> None:
    param = leaves.arrays[index]
    of = leaves.names[index]
    if gradient.shape != param.shape:
        raise ValueError(
            f"{name} must have the shapes of the parameters; {of!r} has a gradient of shape "
            f"{gradient.shape} and a parameter of shape {param.shape}."
        )
    if jnp.iscomplexobj(gradient) != jnp.iscomplexobj(param):
        raise TypeError(
            f"{name} must be real for real parameters and complex for complex ones; {of!r} has a "
            f"gradient of dtype {gradient.dtype} and a parameter of dtype {param.dtype}."
        )
    if unreduced := norms.varying_axes(gradient) - norms.varying_axes(param):
        axes = quoted(unreduced)
        raise ValueError(
            f"{name} must be reduced over the mesh axis {axes}: along it the gradient of {of!r} "
            "differs between devices and its parameter does not. Call "
            f"jax.lax.pmean(grads, {axes}) first."
        )


def check_real(who: str, leaves: Leaves) -> None:
    """Checks that no leaf is complex, for a transformation that would be wrong for it.

    Raises:
        TypeError: a leaf is complex.
    """
    for index, array in enumerate(leaves.arrays):
        if jnp.iscomplexobj(array):
            raise TypeError(
                f"{who} takes no complex numbers, and {leaves.names[index]!r} has dtype "
                f"{array.dtype}. Leave it to another optimizer by optax.partition, such as lamb, "
                "or put optax.contrib.split_real_and_imaginary(...) around the whole optimizer: "
                "its real and imaginary parts are then two arrays, each with a norm of its own."
            )


def check_params(who: str, does: str, params: Any) -> None:
    """Checks that `update` was given the parameters, and says what they are for.

    Raises:
        ValueError: `params` is None.
    """
    if params is None:
        raise ValueError(
            f"params must be given to `update`, because {who} {does}; got None. Call "
            "optimizer.update(grads, state, params)."
        )


def mesh_axes(entry: Any) -> MeshAxes:
    """The mesh axes in one entry of a `PartitionSpec`."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def spec_alike(
    spec: PartitionSpec,
    shape: Shape,
    other: Shape,
) -> PartitionSpec:
    """The spec for an array of shape `other` that belongs to an array of shape `shape`.

    It splits axes of equal length in the same way, and leaves axes of length 1 whole. If the shapes
    differ otherwise, nothing is split.
    """
    if len(other) != len(shape) or any(
        size not in (1, like) for size, like in zip(other, shape, strict=True)
    ):
        return PartitionSpec()
    axes = zip(spec, shape, other, strict=False)
    return PartitionSpec(*(entry if size == like else None for entry, like, size in axes))


def _with_specs(leaves: Leaves, partition_specs: Any) -> Leaves:
    """The leaves with their specs, after checking that the specs agree with the array types."""
    if partition_specs is None:
        return leaves
    given = broadcast_prefix("partition_specs", partition_specs, leaves.tree, is_spec)
    specs = [x.spec if isinstance(x, NamedSharding) else x for x in given]
    split_along: set[str] = set()
    for name, array, spec in zip(leaves.names, leaves.arrays, specs, strict=True):
        if not isinstance(spec, PartitionSpec):
            raise TypeError(
                "partition_specs must hold a jax.sharding.PartitionSpec or NamedSharding for "
                f"{name!r}, got {spec!r}; PartitionSpec() is for a parameter that every device has "
                "whole."
            )
        said = frozenset(axis for entry in spec for axis in mesh_axes(entry))
        varying = norms.varying_axes(array)
        split_along |= said
        if len(spec) > array.ndim:
            raise ValueError(
                f"partition_specs: {spec} has more axes than {name!r} of shape {array.shape}."
            )
        if varying and varying != said:
            raise ValueError(
                f"partition_specs: {spec} is not how {name!r} is split; by its type it differs "
                f"along the mesh axes {quoted(varying)}. Give the spec that shard_map has for it."
            )
    if any(map(norms.is_bound, split_along)):
        return dataclasses.replace(leaves, specs=specs)
    meshes = (x.mesh for x in given if isinstance(x, NamedSharding))
    mesh = next(meshes, jax.sharding.get_abstract_mesh())
    missing = split_along - set(mesh.shape)
    if missing:
        raise ValueError(
            f"partition_specs names the mesh axis {quoted(missing)}, and there is no "
            "such axis here. Outside of shard_map and pmap, pass a tree of NamedSharding, or set "
            "the mesh with jax.set_mesh."
        )
    return dataclasses.replace(leaves, specs=specs, mesh=mesh if split_along else None)


def is_spec(node: Any) -> bool:
    """Whether a node of a tree says how an array is split."""
    return isinstance(node, PartitionSpec | NamedSharding)
