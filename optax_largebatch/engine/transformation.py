"""Leaf transforms as the transformations of optax."""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

import jax
import optax

from optax_largebatch.engine import executor
from optax_largebatch.engine.placement import where_it_runs
from optax_largebatch.engine.program import Program
from optax_largebatch.engine.reductions.protocol import Reductions
from optax_largebatch.engine.scalars import Scalars
from optax_largebatch.engine.shards import on_shards
from optax_largebatch.engine.tracing import LeafArrays
from optax_largebatch.engine.transform import LeafTransform
from optax_largebatch.params.leaves import Leaves, gradients_of, leaves_of


class Transformation(optax.GradientTransformationExtraArgs):
    """An optax transformation that says what it is made of."""

    def __repr__(self) -> str:
        made_of = link_of(self)
        return f"<{made_of.name}>" if made_of else super().__repr__()


def transformation(transform: LeafTransform) -> optax.GradientTransformationExtraArgs:
    """The leaf transform as an optax transformation; `link_of` finds the leaf transform again."""
    bound = _Bound(transform)
    return Transformation(bound.init, bound.update)


def link_of(transform: optax.GradientTransformation) -> LeafTransform | None:
    """The leaf transform that a transformation was made of, or None for a foreign one."""
    owner = getattr(transform.update, "__self__", None)
    return owner.transform if isinstance(owner, _Bound) else None


class _Known(NamedTuple):
    """What is known of a step before any number is."""

    structure: Any
    """That of the parameters."""
    choices: tuple[Any, ...]
    specs: tuple[Any, ...] | None
    mesh: Any
    given: tuple[bool, ...]
    """For each parameter whether it has a gradient."""


class _Bound:
    """The `init` and `update` of a leaf transform."""

    def __init__(self, transform: LeafTransform):
        self.transform = transform
        # A step is traced once for arrays of the same types, be it called inside `jax.jit` or not.
        self._step = jax.jit(self._taken, static_argnums=0, inline=True)

    def init(self, params: optax.Params) -> optax.OptState:
        self.transform.choices(leaves_of("params", params))
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
        if params is None and self.transform.needs_params:
            raise ValueError(
                "params must be given to `update`, because this transformation depends on the "
                "parameters; got None. Call optimizer.update(grads, state, params)."
            )
        leaves, gradients = gradients_of(updates, params, partition_specs)
        known = _Known(
            leaves.treedef,
            tuple(self.transform.choose(leaves)),
            None if leaves.specs is None else tuple(leaves.specs),
            leaves.mesh,
            tuple(x is not None for x in gradients),
        )
        arrays = None if params is None else leaves.arrays
        own, state = self._step(known, [x for x in gradients if x is not None], state, arrays)
        remaining = iter(own)
        new = [next(remaining) if given else None for given in known.given]
        return leaves.rebuild(new), state

    def _taken(self, known: _Known, gradients: Any, state: Any, params: Any) -> Any:
        """The updates of the leaves that have a gradient, and the new state."""

        programs: dict[Any, Program] = {}

        def step(reductions: Reductions) -> Callable[..., Any]:
            return functools.partial(_step, self.transform, known, reductions, programs)

        return where_it_runs(step, gradients, state, params)


def _step(
    transform: LeafTransform,
    known: _Known,
    reductions: Reductions,
    programs: dict[Any, Program],
    gradients: Sequence[jax.Array],
    state: Any,
    params: Sequence[jax.Array] | None,
) -> tuple[list[jax.Array], Any]:
    """One step, with sums taken in a given way."""
    arrays = list(gradients if params is None else params)
    tree = known.structure.unflatten(arrays)
    specs = None if known.specs is None else list(known.specs)
    leaves = Leaves(tree, known.structure, arrays, specs, known.mesh)
    states = transform.split(state, leaves)
    with_gradient = [index for index, given in enumerate(known.given) if given]
    own = {
        i: LeafArrays(gradient, None if params is None else arrays[i], states[i])
        for i, gradient in zip(with_gradient, gradients, strict=True)
    }
    scalars = Scalars(transform.scalars(state))

    def run(arrays: Any, scalars: Scalars, split: Any) -> Any:
        return executor.run(
            transform, arrays, scalars, known.choices, split, known.specs, reductions, programs
        )

    results = on_shards(transform, run, own, scalars, leaves)
    for index, (_, part) in results.items():
        states[index] = part
    updates = [results[i][0].astype(arrays[i].dtype) for i in with_gradient]
    return updates, transform.join(state, states, leaves, reductions.ready)
