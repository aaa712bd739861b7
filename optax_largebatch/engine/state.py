"""Declarations of the state that a transform keeps from step to step.

A declaration is the NamedTuple of the state, with one of these fields in place of each array::

    declare(MomentumState, count=Counter(), trace=PerParameter())

The declaration makes the first state, splits it by leaves and joins the new states of leaves. So
nothing undeclared is kept, and nothing declared gets lost.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax

from optax_largebatch import norms
from optax_largebatch.numerics import zeros_like
from optax_largebatch.params.leaves import Leaves
from optax_largebatch.params.paths import leaf_names, stands_for_all
from optax_largebatch.params.placement import replicated
from optax_largebatch.params.shapes import Shape
from optax_largebatch.params.stacked import Stacked

ArrayKind = Literal["per element", "per block", "whole"]
"""What an array in the state of a leaf is: a number for each element of the leaf, a number for each
of its blocks, or an array that every device has whole."""


@dataclasses.dataclass(frozen=True)
class Field:
    """How one field of a state is made, split by leaves and joined again.

    By default a field has one value, the same for all leaves.
    """

    kind: ClassVar[ArrayKind] = "whole"
    """The kind of the arrays in the value of a leaf; shapes do not tell."""

    name: str = dataclasses.field(default="", kw_only=True)
    """The name in the state, for errors; the transform fills it in."""

    def of_transform(self, name: str, stacked: Stacked) -> "Field":
        """The same field of a transform: with its name, and the stacks of the transform."""
        del stacked
        return dataclasses.replace(self, name=name)

    def init(self, params: optax.Params) -> Any:
        """The value of the field before the first step."""
        raise NotImplementedError

    def split(self, value: Any, leaves: Leaves) -> Sequence[Any]:
        """The value of the field for each leaf."""
        return [value] * len(leaves.arrays)

    def kinds(self, leaf_value: Any) -> Any:
        """The `ArrayKind` of each array in the value of a leaf."""
        return jax.tree.map(lambda _: self.kind, leaf_value)

    def inside(self, value: Any) -> list[tuple[Any, Any]]:
        """The transforms with states inside a value, also of a leaf, and these states."""
        return []

    def join(self, old: Any, leaf_values: list[Any], leaves: Leaves) -> Any:
        """The new value, from the old one and the new value of each leaf."""
        moved = (value for value in leaf_values if value is not old)
        return _cast_like(next(moved, old), old)


@dataclasses.dataclass(frozen=True)
class Counter(Field):
    """The number of steps taken. The engine counts; a leaf program only reads it."""

    def init(self, params: optax.Params) -> jax.Array:
        """0."""
        return replicated(jnp.zeros([], jnp.int32), params)

    def split(self, value: Any, leaves: Leaves) -> Sequence[Any]:
        check_shape(self.name, value, ())
        return super().split(value, leaves)

    def join(self, old: Any, leaf_values: list[Any], leaves: Leaves) -> Any:
        return optax.safe_increment(old)


@dataclasses.dataclass(frozen=True)
class PerParameter(Field):
    """One array for each parameter, of its shape; zeros at first.

    Args:
        dtype: its dtype; None for float32 (float64 for float64 parameters).
        is_real: whether it is real for a complex parameter, too, as a mean of squares is.
    """

    kind = "per element"
    dtype: jax.typing.DTypeLike | None = None
    is_real: bool = False

    def init(self, params: optax.Params) -> Any:
        return zeros_like(params, self.dtype, self.is_real)

    def split(self, value: Any, leaves: Leaves) -> Sequence[Any]:
        return leaves.alike(f"the state's {self.name}", value)

    def join(self, old: Any, leaf_values: list[Any], leaves: Leaves) -> Any:
        old_values = leaves.align(f"the state's {self.name}", old)
        return leaves.rebuild(list(map(_cast_like, leaf_values, old_values)))


@dataclasses.dataclass(frozen=True)
class PerAxis(Field):
    """Arrays for the axes of each parameter: a tuple with a tuple for each parameter.

    The parameters are in the order of `jax.tree.leaves`. Their names are left out, and the boxes
    around them: otherwise some trainers would shard these arrays like the parameters. Every device
    has these arrays whole.

    Args:
        initial: a function from the parameters to the first arrays: a tuple for each parameter.
    """

    initial: Callable[[optax.Params], Sequence[tuple[jax.Array, ...]]]

    def init(self, params: optax.Params) -> Any:
        if stands_for_all(params):
            return 0  # it is nothing like the parameters
        for name, leaf in zip(leaf_names(params), jax.tree.leaves(params), strict=True):
            axes = norms.varying_axes(leaf)
            if axes:
                raise ValueError(
                    "init needs whole parameters, for whose axes the state has arrays; got "
                    f"{name!r} split along {sorted(axes)}. Call init outside of shard_map."
                )
        return replicated(tuple(self.initial(params)), params)

    def split(self, value: Any, leaves: Leaves) -> Sequence[Any]:
        check_length(self.name, value, len(leaves.arrays))
        return value

    def join(self, old: Any, leaf_values: list[Any], leaves: Leaves) -> Any:
        return tuple(map(_cast_like, leaf_values, old))


@dataclasses.dataclass(frozen=True)
class Shared(Field):
    """Arrays that are the same for all leaves.

    A leaf program may compute their new values only from what is the same for all leaves: scalars
    of the step, other shared fields and norms of all leaves.

    Args:
        initial: a function from the parameters to the first value.
    """

    initial: Callable[[optax.Params], Any]

    def init(self, params: optax.Params) -> Any:
        return replicated(self.initial(params), params)


@dataclasses.dataclass(frozen=True)
class StateOf(Field):
    """The state of another transform.

    Args:
        transform: the `LeafTransform`.
    """

    transform: Any

    def init(self, params: optax.Params) -> Any:
        return self.transform.init(params)

    def split(self, value: Any, leaves: Leaves) -> Sequence[Any]:
        return self.transform.split(value, leaves)

    def kinds(self, leaf_value: Any) -> Any:
        return self.transform.kinds(leaf_value)

    def inside(self, value: Any) -> list[tuple[Any, Any]]:
        return [(self.transform, value)]

    def join(self, old: Any, leaf_values: list[Any], leaves: Leaves) -> Any:
        return self.transform.join(old, leaf_values, leaves)


def check_length(name: str, value: Any, expected: int) -> None:
    """Checks that a tuple of a state has an entry for each parameter."""
    if len(value) != expected:
        raise ValueError(
            f"the state's {name} has {len(value)} entries, and there are {expected} parameters. It "
            "belongs to other parameters. Call `init` of this optimizer with these parameters, or "
            "restore into the state that `init` returns."
        )


def check_shape(name: str, value: Any, expected: Shape) -> None:
    """Checks the shape of an array of a state that does not belong to single leaves."""
    if jnp.shape(value) != expected:
        raise ValueError(
            f"the state's {name} has the shape {jnp.shape(value)}, and not {expected}. It belongs "
            "to an optimizer with other options, or has an axis for several models. Call `init` "
            "of this optimizer, or restore into the state that `init` returns."
        )


def declare(kind: type[tuple[Any, ...]], **fields: Field) -> Any:
    """The declaration of a state: its NamedTuple, with a `Field` in each place."""
    return kind(**fields)


def names_and_fields(declaration: Any) -> Iterator[tuple[str, Field]]:
    """The fields of a declaration with their names; in a plain tuple they are numbered."""
    names = getattr(declaration, "_fields", map(str, range(len(declaration))))
    return zip(names, declaration, strict=True)


def built_like(declaration: Any, values: Sequence[Any]) -> Any:
    """A state, or a part of one, with these values in its fields."""
    return declaration._make(values) if hasattr(declaration, "_make") else tuple(values)


def _cast_like(now: Any, old: Any) -> Any:
    """New state, with the dtypes of the old."""
    return jax.tree.map(lambda x, like: jnp.asarray(x, like.dtype), now, old)
