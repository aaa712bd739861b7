"""Leaf transforms as the transformations of optax."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import PartitionSpec
import optax

from optax_largebatch.engine.step import StaticInfo, Step
from optax_largebatch.engine.transform import LeafTransform
from optax_largebatch.params.leaves import check_params, gradients_of, leaves_of


class Transformation(optax.GradientTransformationExtraArgs):
    """An optax transformation that knows its leaf transform."""

    def __repr__(self) -> str:
        made_of = leaf_transform_of(self)
        return f"<{made_of.name}>" if made_of else super().__repr__()


def transformation(
    leaf: LeafTransform | Callable[..., Any],
    **fields: Any,
) -> optax.GradientTransformationExtraArgs:
    """A transformation of optax; `leaf_transform_of` finds its leaf transform again.

    Args:
        leaf: a leaf program, or a leaf transform that has been made already.
        **fields: with a leaf program, the other fields of its `LeafTransform`.
    """
    bound = _Bound(leaf if isinstance(leaf, LeafTransform) else LeafTransform(leaf, **fields))
    return Transformation(bound.init, bound.update)


def leaf_transform_of(transform: optax.GradientTransformation) -> LeafTransform | None:
    """The leaf transform that a transformation was made of, or None for a foreign one."""
    owner = getattr(transform.update, "__self__", None)
    return owner.transform if isinstance(owner, _Bound) else None


class _Bound:
    """The `init` and `update` of a leaf transform."""

    def __init__(self, transform: LeafTransform):
        self.transform = transform

    @functools.cached_property
    def _step(self) -> Any:
        """Traced once for arrays of the same types, inside `jax.jit` or outside.

        It is made when it is first called: the links of a chain need none.
        """

        def take_step(info: StaticInfo, *arrays: Any) -> Any:
            return Step(self.transform, info).take(*arrays)

        return jax.jit(take_step, static_argnums=0, inline=True)

    def init(self, params: optax.Params) -> optax.OptState:
        leaves = leaves_of("params", params)
        # Choices are made for their errors. How a leaf is split matters to a step only. What
        # stands for parameters has no leaves to choose for.
        if leaves.arrays:
            whole = [PartitionSpec()] * len(leaves.arrays)
            self.transform.choose(dataclasses.replace(leaves, specs=whole))
        return self.transform.init(params)

    def update(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        partition_specs: Any = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        del extra_args
        if self.transform.needs_params:
            check_params("this transformation", "depends on the parameters", params)
        self.transform.check(state)
        leaves, gradients = gradients_of(updates, params, partition_specs)
        info = StaticInfo.of(self.transform, leaves)
        arrays = None if params is None else leaves.arrays
        new, state = self._step(info, gradients, state, arrays)
        return leaves.rebuild(new), state
