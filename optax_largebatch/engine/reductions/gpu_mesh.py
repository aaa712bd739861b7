"""Sums on several GPUs, each of which has parts of leaves."""

import jax
from jax.sharding import AxisType

from optax_largebatch.engine.reductions.groups import most_side_by_side
from optax_largebatch.engine.reductions.xla import XlaReductions
from optax_largebatch.engine.tracing import LeafArrays


class GpuMeshReductions(XlaReductions):
    """Small leaves that are alike take their sums side by side, if their types say how they lie."""

    def most_of_a_set(self, leaf: LeafArrays) -> int:
        """As on one GPU, but under automatic partitioning every leaf by itself.

        There, leaves of one shape may be split along different axes, which only the compiler knows.
        To put them side by side, it would have to move them.
        """
        mesh = jax.typeof(leaf.gradient).sharding.mesh
        known = not mesh.empty and AxisType.Auto not in mesh.axis_types
        return most_side_by_side(leaf) if known else 1
