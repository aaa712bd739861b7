"""How a step runs in each kind of place: a row of a table for each."""

import dataclasses
from typing import Any, Literal

import jax

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
    side_by_side: Literal["never", "always", "if types say"] = "never"
    """Small leaves that are alike take their sums as one array. Under automatic partitioning,
    leaves of one shape may be split along different axes, which types do not say: they would be
    moved."""
    numbers_as_vectors: bool = False
    """Numbers of alike leaves are computed as vectors, after each round."""
    writes_late: bool = False
    """The last pass over a leaf writes its state, if two sums of a round are computed from it."""
    sums_wait: bool = False
    """No sum of a round is ready before all are, so that they travel as one."""
    vectors_in_pieces: bool = True
    """Many numbers become a vector in pieces, each of which one kernel takes."""


ONE_CPU = Place(sums.on_cpu, group=2**18, in_calls=True, vectors_in_pieces=False)
ONE_GPU = Place(sums.at_once, group=2**18, in_turn=True, small_first=True, side_by_side="always")
ONE_TPU = Place(sums.plain, group=2**18, in_turn=True, writes_late=True)
SEVERAL = Place(sums.plain, numbers_as_vectors=True, writes_late=True, sums_wait=True)
SEVERAL_GPUS = dataclasses.replace(SEVERAL, side_by_side="if types say")

ON_ONE_DEVICE = {"cpu": ONE_CPU, "cuda": ONE_GPU, "rocm": ONE_GPU, "tpu": ONE_TPU}
"""The places where one device has all leaves, by platform."""

ON_A_MESH = {"gpu": SEVERAL_GPUS}
"""The places with several devices, by platform, that are not `SEVERAL`."""


def on_a_mesh(arrays: Any) -> Place:
    """The place of a step on the mesh that the types of its arrays name.

    In older jax types do not say of what devices a mesh is; there, all meshes are alike.
    """
    meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays))
    devices = (getattr(mesh, "abstract_device", None) for mesh in meshes)
    platforms = {getattr(device, "platform", "") for device in devices if device}
    places = {ON_A_MESH.get(platform, SEVERAL) for platform in platforms}
    return places.pop() if len(places) == 1 else SEVERAL
