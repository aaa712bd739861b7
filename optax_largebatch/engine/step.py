"""One step of a leaf transform: from the arrays of an update to its results."""

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any, NamedTuple

import jax

from optax_largebatch.engine.compilation import Lowering, dispatch_by_platform
from optax_largebatch.engine.execution_plans import (
    ON_ONE_DEVICE,
    SEVERAL_DEVICES,
    ExecutionPlan,
    on_a_mesh,
)
from optax_largebatch.engine.executor import Execution
from optax_largebatch.engine.program import LeafArrays, Program, Scalars
from optax_largebatch.engine.shards import on_shards
from optax_largebatch.engine.transform import LeafTransform, StaticLeaf
from optax_largebatch.norms import is_on_a_mesh
from optax_largebatch.params.leaves import Leaves


class StaticInfo(NamedTuple):
    """What a step is traced for, with arrays of certain types; hashable."""

    structure: Any
    """The tree structure of the parameters."""
    leaves: tuple[StaticLeaf, ...]
    """What the transform knows of each parameter."""
    specs: tuple[Any, ...] | None
    """How the parameters are split, if `update` is given the specs."""
    mesh: Any
    """The mesh of the specs under `jit`."""

    @classmethod
    def of(cls, transform: LeafTransform, leaves: Leaves) -> "StaticInfo":
        """The information for a step of these parameters."""
        return cls(
            leaves.treedef,
            tuple(transform.choose(leaves)),
            None if leaves.specs is None else tuple(leaves.specs),
            leaves.mesh,
        )


class Arrays(NamedTuple):
    """The arrays of a step."""

    gradients: list[jax.Array | None]
    """The gradient of each parameter, None if it has none."""
    state: Any
    params: list[jax.Array] | None
    scalars: Scalars


class Step:
    """A step; its programs are read once for arrays of the same types.

    Args:
        transform: the transform.
        info: what the step is traced for.
    """

    def __init__(self, transform: LeafTransform, info: StaticInfo):
        self._transform = transform
        self._info = info
        self._programs: dict[Any, Program] = {}

    def take(
        self,
        gradients: list[jax.Array | None],
        state: Any,
        params: list[jax.Array] | None,
    ) -> tuple[list[jax.Array | None], Any]:
        """The update of each parameter, None without a gradient, and the new state."""
        scalars = Scalars(self._transform.scalars(state))
        arrays = Arrays(gradients, state, params, scalars)
        specs_known = self._info.mesh is not None
        if specs_known or is_on_a_mesh(arrays):
            return self.run(on_a_mesh(arrays, specs_known), arrays)
        leaves, _, by_leaf = self.by_leaf(arrays)
        programs = self.programs(by_leaf, arrays.scalars, leaves)
        if any(program.closes_over for program in programs.values()):
            return self.run(on_a_mesh(arrays), arrays)
        flat, structure = jax.tree.flatten(arrays)
        like = leaves.map(lambda _, param: param, gradients)
        types, results = jax.tree.flatten((like, state))

        def lowerings(platform: str | None) -> Lowering:
            plan = SEVERAL_DEVICES if platform is None else ON_ONE_DEVICE[platform]

            def run(*flat: jax.Array) -> list[jax.Array]:
                return jax.tree.leaves(self.run(plan, structure.unflatten(flat)))

            return run

        return results.unflatten(dispatch_by_platform(lowerings, types, *flat))

    def run(
        self,
        plan: ExecutionPlan,
        arrays: Arrays,
    ) -> tuple[list[jax.Array | None], Any]:
        """Updates and state, as the step runs by a plan."""
        leaves, states, by_leaf = self.by_leaf(arrays)
        shards = dataclasses.replace(leaves, mesh=None)
        whole = dataclasses.replace(shards, specs=None) if leaves.mesh else leaves
        programs = self.programs(by_leaf, arrays.scalars, whole)

        def on_one_device(by_leaf: Any, scalars: Scalars) -> Any:
            programs = self.programs(by_leaf, scalars, shards)
            return Execution(programs, by_leaf, scalars, plan).results()

        # Without `jax.shard_map` (jax 0.6.0) the numbers are the same, in more all-reduces.
        if leaves.mesh is None or not hasattr(jax, "shard_map"):
            results = Execution(programs, by_leaf, arrays.scalars, plan).results()
        else:
            results = on_shards(programs, on_one_device, by_leaf, arrays.scalars, leaves)
        updates: list[jax.Array | None] = [None] * len(leaves.arrays)
        for i, (update, state) in results.items():
            updates[i] = update.astype(leaves.arrays[i].dtype)
            states[i] = programs[i].with_constants(state)
        return updates, self._transform.join(arrays.state, states, leaves)

    def by_leaf(
        self,
        arrays: Arrays,
    ) -> tuple[Leaves, list[Any], dict[int, LeafArrays]]:
        """The leaves, the state of each, and the arrays of those that have a gradient."""
        info = self._info
        params = arrays.params
        like = arrays.gradients if params is None else params
        specs = None if info.specs is None else list(info.specs)
        leaves = Leaves(info.structure.unflatten(like), info.structure, like, specs, info.mesh)
        states = self._transform.split(arrays.state, leaves)
        by_leaf = {}
        for i, gradient in enumerate(arrays.gradients):
            if gradient is not None:
                param = None if params is None else params[i]
                by_leaf[i] = LeafArrays(gradient, param, states[i])
        return leaves, states, by_leaf

    def programs(
        self,
        by_leaf: Mapping[int, LeafArrays],
        scalars: Scalars,
        leaves: Leaves,
    ) -> dict[int, Program]:
        """The program of each leaf, the same one for identical leaves."""
        info = self._info
        programs = {}
        for i, leaf in by_leaf.items():
            arrays, structure = jax.tree.flatten(leaf)
            static = info.leaves[i]
            spec = None if info.specs is None else info.specs[i]
            identity = (static, spec, structure, *map(jax.typeof, arrays))
            if identity not in self._programs:
                splits = functools.partial(leaves.split, i)
                self._programs[identity] = Program(self._transform, static, leaf, scalars, splits)
            programs[i] = self._programs[identity]
        return programs
