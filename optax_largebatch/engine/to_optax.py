"""Leaf transforms as the transformations of optax."""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
import optax

from optax_largebatch.engine.executor import Execution, programs_of
from optax_largebatch.engine.placement import is_on_a_mesh, where_it_runs
from optax_largebatch.engine.program import Program
from optax_largebatch.engine.reductions.protocol import Reductions
from optax_largebatch.engine.reductions.xla import XlaReductions
from optax_largebatch.engine.scalars import Scalars
from optax_largebatch.engine.shards import on_shards
from optax_largebatch.engine.tracing import LeafArrays
from optax_largebatch.engine.transform import LeafTransform
from optax_largebatch.params.leaves import Leaves, gradients_of, leaves_of


class Transformation(optax.GradientTransformationExtraArgs):
    """An optax transformation that says what it is made of."""

    def __repr__(self) -> str:
        made_of = leaf_transform_of(self)
        return f"<{made_of.name}>" if made_of else super().__repr__()


def transformation(transform: LeafTransform) -> optax.GradientTransformationExtraArgs:
    """The leaf transform as a transformation of optax; `leaf_transform_of` finds it again."""
    bound = _Bound(transform)
    return Transformation(bound.init, bound.update)


def leaf_transform_of(transform: optax.GradientTransformation) -> LeafTransform | None:
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
        step = _Step(self.transform, known)
        arguments = (gradients, state, params, Scalars(self.transform.scalars(state)))
        told = known.mesh is not None
        if told or is_on_a_mesh(arguments) or step.closes_over_tracers(*arguments):
            return step.taken(XlaReductions(), *arguments)
        parameters = gradients if params is None else params
        updates = [parameters[i] for i, given in enumerate(known.given) if given]

        def way(reductions: Reductions) -> Callable[..., Any]:
            return functools.partial(step.taken, reductions)

        return where_it_runs(way, (updates, state), *arguments)


class _Step:
    """A step of a leaf transform, traced for each place where it may run."""

    def __init__(self, transform: LeafTransform, known: _Known):
        self._transform = transform
        self._known = known
        self._programs: dict[Any, Program] = {}

    def closes_over_tracers(self, *arguments: Any) -> bool:
        """Whether a leaf program uses a traced array that it was not given."""
        arrays, scalars, leaves, _ = self._arranged(*arguments)
        programs = self._programs_of(arrays, scalars, leaves)
        consts = [x for own in programs.values() for x in own.trace.consts]
        return any(isinstance(x, Tracer) for x in consts)

    def taken(
        self,
        reductions: Reductions,
        gradients: Sequence[jax.Array],
        state: Any,
        params: Sequence[jax.Array] | None,
        scalars: Scalars,
    ) -> tuple[list[jax.Array], Any]:
        """The updates and the new state, with sums taken in a given way."""
        arrays, scalars, leaves, states = self._arranged(gradients, state, params, scalars)

        def run(arrays: Any, scalars: Scalars, leaves: Leaves) -> Any:
            programs = self._programs_of(arrays, scalars, leaves)
            return Execution(programs, arrays, scalars, reductions).results()

        results = on_shards(self._transform, run, arrays, scalars, leaves)
        updates = []
        for index, (update, part) in results.items():
            updates.append(update.astype(leaves.arrays[index].dtype))
            states[index] = part
        return updates, self._transform.join(state, states, leaves, reductions.ready)

    def _arranged(
        self,
        gradients: Sequence[jax.Array],
        state: Any,
        params: Sequence[jax.Array] | None,
        scalars: Scalars,
    ) -> tuple[dict[int, LeafArrays], Scalars, Leaves, list[Any]]:
        """The arrays leaf by leaf, and the states of all leaves."""
        known = self._known
        arrays = list(gradients if params is None else params)
        specs = None if known.specs is None else list(known.specs)
        tree = known.structure.unflatten(arrays)
        leaves = Leaves(tree, known.structure, arrays, specs, known.mesh)
        states = self._transform.split(state, leaves)
        with_gradient = [index for index, given in enumerate(known.given) if given]
        own = {
            i: LeafArrays(gradient, None if params is None else arrays[i], states[i])
            for i, gradient in zip(with_gradient, gradients, strict=True)
        }
        return own, scalars, leaves, states

    def _programs_of(
        self, arrays: dict[int, LeafArrays], scalars: Scalars, leaves: Leaves
    ) -> dict[int, Program]:
        known = self._known
        return programs_of(
            self._transform,
            arrays,
            scalars,
            known.choices,
            leaves.split,
            known.specs,
            self._programs,
        )
