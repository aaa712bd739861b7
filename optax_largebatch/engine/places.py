"""How a step runs in each kind of place: a row of a table for each."""

import dataclasses
from typing import Any

import jax
from jax.sharding import AxisType

from optax_largebatch.engine import sums


@dataclasses.dataclass(frozen=True)
class Place:
    """How a step runs in a place. What each switch is worth stands in README.md."""

    sums: sums.Sums
    """How a device takes the sums of a round."""
    group: int | None = None
    """Leaves go one after the other, small ones together up to so many elements; None: all take
    each round together, because devices need each other for it."""
    in_turn: bool = False
    """A group waits until the group before it has written its state."""
    small_first: bool = False
    """The leaves go by size: XLA on a GPU runs next what allocates least. If the next leaf is not
    smaller, that is the last pass over the leaf before it."""
    in_calls: bool = False
    """Each leaf of a group goes through all its rounds by itself, in calls that stay apart."""
    side_by_side: bool = False
    """Small leaves that are alike take their sums as one array."""
    numbers_as_vectors: bool = False
    """Numbers of alike leaves are computed as vectors; in turn, after the last round alone."""
    writes_late: bool = False
    """The last pass over a leaf writes its state, if two sums of a round are computed from it."""
    sums_wait: bool = False
    """No sum of a round is ready before all are, so that they travel as one."""
    vectors_in_pieces: bool = True
    """Many numbers become a vector in pieces, each of which one kernel takes."""


ONE_CPU = Place(sums.on_cpu, group=2**18, in_calls=True, vectors_in_pieces=False)
# Of one GPU, and of the shards of several.
GPU = Place(sums.at_once, side_by_side=True, numbers_as_vectors=True)
# Two matrices of 768 x 768 are a group.
ONE_GPU = dataclasses.replace(GPU, group=5 * 2**18, in_turn=True, small_first=True)
ONE_TPU = Place(sums.plain, group=2**18, in_turn=True, writes_late=True)
SEVERAL = Place(sums.plain, numbers_as_vectors=True, writes_late=True, sums_wait=True)
SEVERAL_GPUS = dataclasses.replace(SEVERAL, side_by_side=True)
SHARDS_ON_GPUS = dataclasses.replace(GPU, writes_late=True, sums_wait=True)

ON_ONE_DEVICE = {"cpu": ONE_CPU, "cuda": ONE_GPU, "rocm": ONE_GPU, "tpu": ONE_TPU}
"""The places where one device has all leaves, by platform."""

ON_A_MESH = {("gpu", AxisType.Explicit): SEVERAL_GPUS, ("gpu", AxisType.Manual): SHARDS_ON_GPUS}
"""The places with several devices that are not `SEVERAL`, by platform and by how arrays are split.

Under automatic partitioning, leaves of one shape may be split along different axes, which types do
not say: side by side they would be moved. A reduction of several arrays would gather them, unless
it is of the shards of a device.
"""


def on_a_mesh(arrays: Any, told: bool) -> Place:
    """The place of a step on the mesh that the types of its arrays name.

    In older jax types do not say of what devices a mesh is; there, all meshes are alike.

    Args:
        arrays: the arrays of the step.
        told: whether it goes to the shards of each device.
    """
    kinds = {
        (getattr(device, "platform", ""), AxisType.Manual if told else kind)
        for mesh in {jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays)}
        if (device := getattr(mesh, "abstract_device", None))
        for kind in mesh.axis_types
    }
    return ON_A_MESH.get(kinds.pop(), SEVERAL) if len(kinds) == 1 else SEVERAL
