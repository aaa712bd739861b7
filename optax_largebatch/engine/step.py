"""One step of a leaf transform: from the arrays of an update to its results."""

from collections.abc import Sequence
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_largebatch.engine.alike import in_pieces
from optax_largebatch.engine.arrays import LeafArrays, Scalars
from optax_largebatch.engine.compilation import Way, barrier, by_place
from optax_largebatch.engine.executor import Execution
from optax_largebatch.engine.places import ON_ONE_DEVICE, SEVERAL, Place, on_a_mesh
from optax_largebatch.engine.replay import Program
from optax_largebatch.engine.shards import on_shards
from optax_largebatch.engine.transform import LeafTransform
from optax_largebatch.norms import accumulation_dtype, is_on_a_mesh
from optax_largebatch.params.leaves import Leaves


class Facts(NamedTuple):
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

    @classmethod
    def of(
        cls, transform: LeafTransform, leaves: Leaves, gradients: Sequence[jax.Array | None]
    ) -> "Facts":
        """The facts of a step for these parameters."""
        return cls(
            leaves.treedef,
            tuple(transform.choose(leaves)),
            None if leaves.specs is None else tuple(leaves.specs),
            leaves.mesh,
            tuple(i for i, gradient in enumerate(gradients) if gradient is not None),
        )


class Arrays(NamedTuple):
    """The arrays of a step."""

    gradients: list[jax.Array]
    """The gradients of the parameters that have one."""
    state: Any
    params: list[jax.Array] | None
    scalars: Scalars


class Step:
    """A step, traced anew for each place in which it may run.

    Args:
        transform: the transform.
        facts: what is known of the step.
    """

    def __init__(self, transform: LeafTransform, facts: Facts):
        self._transform = transform
        self._facts = facts
        self._programs: dict[Any, Program] = {}

    def take(
        self, gradients: list[jax.Array], state: Any, params: list[jax.Array] | None
    ) -> tuple[list[jax.Array], Any]:
        """The updates of the parameters that have a gradient, and the new state."""
        arrays = Arrays(gradients, state, params, Scalars(self._transform.scalars(state)))
        told = self._facts.mesh is not None
        if told or is_on_a_mesh(arrays) or self._closes_over_tracers(arrays):
            return self.taken(on_a_mesh(arrays, told), arrays)
        own, structure = jax.tree.flatten(arrays)
        like = gradients if params is None else [params[i] for i in self._facts.with_gradient]
        results, result = jax.tree.flatten((like, state))

        def ways(platform: str | None) -> Way:
            place = SEVERAL if platform is None else ON_ONE_DEVICE[platform]
            return lambda *own: jax.tree.leaves(self.taken(place, structure.unflatten(own)))

        return result.unflatten(by_place(ways, results, *own))

    def taken(self, place: Place, arrays: Arrays) -> tuple[list[jax.Array], Any]:
        """Updates and state, as the step runs in a place."""
        leaves, parts, own = self.by_leaf(arrays)

        def run(own: Any, scalars: Scalars, leaves: Leaves) -> Any:
            return Execution(self.programs_of(own, scalars, leaves), own, scalars, place).results()

        results = on_shards(self._transform, run, own, arrays.scalars, leaves)
        updates = []
        for i, (update, part) in results.items():
            updates.append(update.astype(leaves.arrays[i].dtype))
            parts[i] = part
        concat = _in_pieces if place.vectors_in_pieces else jnp.concatenate
        return updates, self._transform.join(arrays.state, parts, leaves, concat)

    def by_leaf(self, arrays: Arrays) -> tuple[Leaves, list[Any], dict[int, LeafArrays]]:
        """The leaves, the state of each, and the arrays of those that have a gradient."""
        facts, params = self._facts, arrays.params
        own = arrays.gradients if params is None else params
        specs = None if facts.specs is None else list(facts.specs)
        leaves = Leaves(facts.structure.unflatten(own), facts.structure, own, specs, facts.mesh)
        parts = self._transform.split(arrays.state, leaves)
        columns = zip(facts.with_gradient, arrays.gradients, strict=True)
        with_gradient = {
            i: LeafArrays(x, params[i] if params else None, parts[i]) for i, x in columns
        }
        return leaves, parts, with_gradient

    def programs_of(
        self, own: dict[int, LeafArrays], scalars: Scalars, leaves: Leaves
    ) -> dict[int, Program]:
        """The program of each leaf, the same one for leaves that are alike."""
        of_all = accumulation_dtype(*map(LeafArrays.dtype, own.values()))
        programs = {}
        for i, leaf in own.items():
            arrays, structure = jax.tree.flatten(leaf)
            choice, spec = self._facts.choices[i], self._facts.specs and self._facts.specs[i]
            alike = (choice, spec, of_all, structure, *map(jax.typeof, arrays))
            if alike not in self._programs:
                split = functools.partial(leaves.split, i)
                program = Program(self._transform, choice, leaf, scalars, split, of_all)
                self._programs[alike] = program
            programs[i] = self._programs[alike]
        return programs

    def _closes_over_tracers(self, arrays: Arrays) -> bool:
        """Whether a leaf program uses a traced array that it is not given; reads all programs."""
        leaves, _, own = self.by_leaf(arrays)
        programs = self.programs_of(own, arrays.scalars, leaves)
        return any(program.closes_over for program in programs.values())


def _in_pieces(vectors: Sequence[jax.Array]) -> jax.Array:
    """One vector of many, made in pieces: XLA would take a kernel for each of many numbers."""
    pieces = [jnp.concatenate(piece) for piece in in_pieces(vectors)]
    # Or the kernel of the last concatenation would compute all numbers once more.
    return jnp.concatenate(barrier(pieces)) if len(pieces) > 1 else pieces[0]
