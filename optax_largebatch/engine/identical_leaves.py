"""Which leaves take their passes together, and which numbers are computed together.

A GPU starts the kernel of a small leaf more slowly than it runs it, and XLA takes long to compile a
thousand kernels. So small leaves that are identical but for their numbers are a *batch*. XLA puts
them side by side while it reads them, and copies nothing. The last pass goes over each leaf by
itself. The leaves of a batch read their numbers from one vector, so XLA merges these passes too.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import itertools
from typing import Any, TypeVar

import jax

from optax_largebatch.engine.execution_plans import ExecutionPlan
from optax_largebatch.engine.program import LeafArrays, PassInputs, Program, Result
from optax_largebatch.engine.requests import Round

Key = TypeVar("Key")

MAX_BATCHED_LEAF = 2**18
"""The elements of a leaf in a batch; a pass over more keeps a GPU busy."""

MAX_BATCH = 2**21
"""The elements of the leaves of a batch. A GPU's cache has four such arrays."""

MAX_KERNEL_ARRAYS = 90
"""The arrays that one kernel reads and writes; XLA takes no more than 96."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["leaves", "inputs", "results"],
    meta_fields=["program"],
)
@dataclasses.dataclass(eq=False)
class Batch:
    """Leaves that take their passes together, by their numbers; most batches have one."""

    program: Program
    leaves: dict[int, LeafArrays]
    inputs: PassInputs = dataclasses.field(default_factory=PassInputs)
    """The inputs of the next pass."""
    results: dict[int, Result] = dataclasses.field(default_factory=dict)
    """The result of each leaf, after the last pass."""

    @property
    def remaining(self) -> Sequence[Round]:
        """The rounds that it has not taken."""
        return self.program.rounds[len(self.inputs.answers) :]

    @property
    def arrays(self) -> list[LeafArrays]:
        """The arrays of each leaf."""
        return list(self.leaves.values())

    @property
    def is_several(self) -> bool:
        """Whether it has several leaves."""
        return len(self.leaves) > 1


def batch_identical(
    programs: Mapping[int, Program],
    leaves: Mapping[int, LeafArrays],
    plan: ExecutionPlan,
) -> list[Batch]:
    """The batches, in the order of the first leaf of each.

    Args:
        programs: the program of each leaf, the same one for identical leaves.
        leaves: their arrays.
        plan: how the step runs.
    """
    alike: dict[Any, list[int]] = {}
    for i, program in programs.items():
        on_elements = program.tileable and not any(x.of_each for x in program.rounds)
        alike.setdefault(program if on_elements else i, []).append(i)
    batches: list[list[int]] = []
    for identical in alike.values():
        batches += even_chunks(identical, _largest_batch(leaves[identical[0]], plan))
    return [Batch(programs[batch[0]], {i: leaves[i] for i in batch}) for batch in sorted(batches)]


def gradients_of(batches: Sequence[Batch]) -> dict[int, jax.Array]:
    """The gradients of all leaves of some batches."""
    return {i: leaf.gradient for batch in batches for i, leaf in batch.leaves.items()}


def replace_gradients(
    batches: Sequence[Batch],
    gradients: Mapping[int, jax.Array],
) -> None:
    """Goes on with gradients that have waited for something."""
    for batch in batches:
        for i, leaf in batch.leaves.items():
            batch.leaves[i] = leaf._replace(gradient=gradients[i])


def group_leaves(
    sizes: Mapping[Key, int],
    group_size: int | None,
) -> list[list[Key]]:
    """The leaves in order, several small ones at a time.

    Args:
        sizes: the elements of each leaf.
        group_size: the elements of a group of several leaves, at most; None for one group of all.
    """
    groups: list[list[Key]] = []
    room = 0
    for key, size in sizes.items():
        if not groups or (group_size is not None and size > room):
            groups.append([])
            room = group_size or 0
        groups[-1].append(key)
        room -= size
    return groups


def even_chunks(items: Sequence[int], most: int) -> list[list[int]]:
    """The items in order, in chunks of one size if that needs few more than the fewest chunks."""
    count = len(items)
    fewest = -(-count // most)
    few = range(fewest, fewest * 4 // 3 + 1)
    number = next((n for n in few if count % n == 0), fewest)
    bounds = [count * k // number for k in range(number + 1)]
    return [list(items[start:stop]) for start, stop in itertools.pairwise(bounds)]


def _largest_batch(leaf: LeafArrays, plan: ExecutionPlan) -> int:
    """How many leaves like this one a batch may have: 1 for a large one.

    The kernel of their last pass reads all arrays of a leaf and writes all but the gradient.
    """
    size = leaf.gradient.size
    if not plan.batch_identical or size > MAX_BATCHED_LEAF:
        return 1
    read = sum(x.shape == leaf.gradient.shape for x in jax.tree.leaves(leaf))
    in_one_kernel = MAX_KERNEL_ARRAYS // (2 * read - 1)
    in_the_cache = MAX_BATCH // max(size, 1)
    return max(min(in_one_kernel, in_the_cache), 1)
