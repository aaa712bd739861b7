"""How a step runs on each kind of device: a table with a row for each."""

import dataclasses
from typing import Any

import jax
from jax.sharding import AxisType

from optax_largebatch.engine import sums


@dataclasses.dataclass(frozen=True)
class ExecutionPlan:
    """How a step runs. README.md says what each switch is worth."""

    sums: sums.Sums
    """How a device takes the sums of a round."""
    group_size: int | None = None
    """Leaves go one after the other. Small ones go in groups of so many elements. With None all
    leaves take each round together, because devices need each other for it."""
    serialize_groups: bool = False
    """A group waits until the group before it has written its state."""
    smallest_first: bool = False
    """The leaves are sorted by size. XLA on a GPU runs next what allocates least. If the next leaf
    is not smaller, that is the last pass over the leaf before it."""
    no_inline: bool = False
    """The passes of each group are calls that XLA does not inline."""
    batch_identical: bool = False
    """Small leaves of one shape take their sums as one array."""
    batch_matrices: bool = False
    """Matrices of one shape, of several leaves, are multiplied as one batch: a GPU runs few large
    products faster than many small ones, and a CPU more slowly."""
    batch_hoisted: bool = False
    """Hoisted numbers of identical leaves are computed as vectors. With `serialize_groups` only
    after the last round."""
    defer_state_writes: bool = False
    """The last pass over a leaf writes its state, if a round takes two sums or more of arrays that
    are computed. (`Execution._defers_writes` has the other conditions.)"""
    fuse_reductions: bool = False
    """No sum of a round is ready before all are, so that they travel as one. The sums of shards are
    one vector anyway."""


ONE_CPU = ExecutionPlan(sums.on_cpu, group_size=2**18, no_inline=True)
# Of one GPU, and of the shards of several.
GPU = ExecutionPlan(
    sums.variadic,
    batch_identical=True,
    batch_matrices=True,
    batch_hoisted=True,
)
# Two matrices of 768 x 768 are a group.
ONE_GPU = dataclasses.replace(
    GPU,
    group_size=5 * 2**18,
    serialize_groups=True,
    smallest_first=True,
)
ONE_TPU = ExecutionPlan(
    sums.plain,
    group_size=2**18,
    serialize_groups=True,
    defer_state_writes=True,
)
SEVERAL_DEVICES = ExecutionPlan(
    sums.plain,
    batch_hoisted=True,
    defer_state_writes=True,
    fuse_reductions=True,
)
SEVERAL_GPUS = dataclasses.replace(SEVERAL_DEVICES, batch_identical=True)
SHARDS_ON_GPUS = dataclasses.replace(GPU, defer_state_writes=True)

ON_ONE_DEVICE = {"cpu": ONE_CPU, "cuda": ONE_GPU, "rocm": ONE_GPU, "tpu": ONE_TPU}
"""The plans if one device has all leaves, by platform."""

ON_A_MESH = {
    ("gpu", AxisType.Explicit): SEVERAL_GPUS,
    ("gpu", AxisType.Manual): SHARDS_ON_GPUS,
}
"""The plans for several devices that are not `SEVERAL_DEVICES`, by platform and kind of mesh axes.

Types do not say how automatic partitioning splits a leaf. Side by side, leaves that are split along
different axes would be moved, and a variadic reduction would gather them.
"""


def on_a_mesh(arrays: Any, on_shards: bool = False) -> ExecutionPlan:
    """The plan of a step on the mesh that the types of its arrays name.

    In older jax, types do not say what devices a mesh has; then all meshes have the same plan.

    Args:
        arrays: the arrays of the step.
        on_shards: whether it goes to the shards of each device.
    """
    kinds = {
        (getattr(device, "platform", ""), AxisType.Manual if on_shards else kind)
        for mesh in {jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays)}
        if (device := getattr(mesh, "abstract_device", None))
        for kind in mesh.axis_types
    }
    if len(kinds) != 1:
        return SEVERAL_DEVICES
    return ON_A_MESH.get(kinds.pop(), SEVERAL_DEVICES)
