"""One step of a leaf transform: from the arrays of an update to its results."""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from optax_largebatch.engine.executor import Execution, programs_of
from optax_largebatch.engine.placement import on_a_mesh, where_it_runs
from optax_largebatch.engine.program import Program
from optax_largebatch.engine.reductions.protocol import Reductions
from optax_largebatch.engine.scalars import Scalars
from optax_largebatch.engine.shards import on_shards
from optax_largebatch.engine.tracing import LeafArrays
from optax_largebatch.engine.transform import LeafTransform
from optax_largebatch.norms import is_on_a_mesh
from optax_largebatch.params.leaves import Leaves


class Known(NamedTuple):
    """The facts of a step that are known before any number; hashable."""

    structure: Any
    """The tree structure of the parameters."""
    choices: tuple[Any, ...]
    """The transform's choice for each parameter."""
    specs: tuple[Any, ...] | None
    """How the parameters are split, if `update` is told."""
    mesh: Any
    """The mesh of the specs under `jit`."""
    with_gradient: tuple[int, ...]
    """The parameters that have a gradient."""


class Arrays(NamedTuple):
    """The arrays of a step."""

    gradients: list[jax.Array]
    """The gradients of the parameters that have one."""
    state: Any
    params: list[jax.Array] | None
    scalars: Scalars

    @property
    def parameters(self) -> list[jax.Array]:
        """The parameters, or the gradients where a transform needs no parameters."""
        return self.gradients if self.params is None else self.params


class Step:
    """A step, traced anew for each way in which it may run.

    Args:
        transform: the transform.
        known: the facts of the step.
    """

    def __init__(self, transform: LeafTransform, known: Known):
        self._transform = transform
        self._known = known
        self._programs: dict[Any, Program] = {}

    def take(
        self, gradients: list[jax.Array], state: Any, params: list[jax.Array] | None
    ) -> tuple[list[jax.Array], Any]:
        """The updates of the parameters that have a gradient, and the new state."""
        arrays = Arrays(gradients, state, params, Scalars(self._transform.scalars(state)))
        told = self._known.mesh is not None
        if told or is_on_a_mesh(arrays) or self._closes_over_tracers(arrays):
            return self._taken(on_a_mesh(arrays), arrays)
        updates = [arrays.parameters[i] for i in self._known.with_gradient]

        def way(reductions: Reductions) -> Callable[[Arrays], Any]:
            return functools.partial(self._taken, reductions)

        return where_it_runs(way, (updates, state), arrays)

    def _taken(self, reductions: Reductions, arrays: Arrays) -> tuple[list[jax.Array], Any]:
        """Updates and state, with sums taken in a given way."""
        leaves = self._leaves(arrays)
        parts = self._transform.split(arrays.state, leaves)

        def run(own: Any, scalars: Scalars, leaves: Leaves) -> Any:
            programs = self._programs_of(own, scalars, leaves)
            return Execution(programs, own, scalars, reductions).results()

        own = self._by_leaf(arrays, parts)
        results = on_shards(self._transform, run, own, arrays.scalars, leaves)
        updates = []
        for i, (update, part) in results.items():
            updates.append(update.astype(leaves.arrays[i].dtype))
            parts[i] = part
        return updates, self._transform.join(arrays.state, parts, leaves, reductions.concatenated)

    def _closes_over_tracers(self, arrays: Arrays) -> bool:
        """Whether a leaf program uses a traced array that it is not given; checks all programs."""
        leaves = self._leaves(arrays)
        own = self._by_leaf(arrays, self._transform.split(arrays.state, leaves))
        programs = self._programs_of(own, arrays.scalars, leaves)
        consts = [x for program in programs.values() for x in program.trace.consts]
        return any(isinstance(x, Tracer) for x in consts)

    def _leaves(self, arrays: Arrays) -> Leaves:
        known = self._known
        specs = None if known.specs is None else list(known.specs)
        tree = known.structure.unflatten(arrays.parameters)
        return Leaves(tree, known.structure, arrays.parameters, specs, known.mesh)

    def _by_leaf(self, arrays: Arrays, parts: Sequence[Any]) -> dict[int, LeafArrays]:
        """The arrays of each leaf that has a gradient."""
        params = arrays.params
        return {
            i: LeafArrays(gradient, None if params is None else params[i], parts[i])
            for i, gradient in zip(self._known.with_gradient, arrays.gradients, strict=True)
        }

    def _programs_of(
        self, own: dict[int, LeafArrays], scalars: Scalars, leaves: Leaves
    ) -> dict[int, Program]:
        known = self._known
        return programs_of(
            self._transform, own, scalars, known.choices, leaves.split, known.specs, self._programs
        )
