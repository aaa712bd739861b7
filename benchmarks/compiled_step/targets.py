"""Machines for which a step is compiled; none of them is needed.

XLA's compilers for NVIDIA and for TPUs run on any Linux machine. `make compilers` installs them:
wheels only, no driver and no CUDA library.
"""

from collections.abc import Sequence
import importlib.util
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

# The compilers read this when they are loaded. A card would choose cuBLAS for products of matrices;
# where none is there to try, XLA would take Triton kernels with tiny tiles.
FLAGS = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
os.environ |= {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
}

import jax
from jax._src import xla_bridge
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
import numpy as np

jax.config.update("jax_platforms", "cpu")  # the compilers' packages would look for their devices

AXES = ("fsdp", "tensor")


class Target(NamedTuple):
    """A machine, or several of one kind."""

    platform: str
    topology: str
    mesh: tuple[int, int] = (1, 1)
    """The devices along the axes `fsdp` and `tensor`."""

    @property
    def number(self) -> int:
        """The number of devices."""
        return math.prod(self.mesh)

    @property
    def is_available(self) -> bool:
        """Whether its compiler is installed."""
        package = "libtpu" if self.platform == "tpu" else "jax_cuda12_plugin"
        return importlib.util.find_spec(package) is not None

    def devices(self) -> Sequence[Any]:
        """The devices, as far as a compiler has to know them."""
        if self.platform == "tpu":
            kind = self.topology
            return topologies.get_topology_desc(platform="tpu", topology_name=kind).devices
        # JAX asks for the backend that compiles and does not find it: JAX's issue 23971.
        known = xla_bridge.canonicalize_platform

        def with_cuda(platform: str) -> str:
            return "cuda" if platform in ("cuda", "gpu") else known(platform)

        xla_bridge.canonicalize_platform = with_cuda
        return topologies.get_topology_desc(
            platform="cuda",
            topology_name=self.topology,
            target_config=Path(__file__).with_name("h100.txtpb").read_text(),
            topology=f"1x1x{self.number}",
        ).devices

    def placed(self, tree: Any) -> Any:
        """Arrays without numbers, split over the devices: by both axes where they can be."""
        devices = self.devices()[: self.number]
        if self.number == 1:
            alone = SingleDeviceSharding(devices[0])
            return jax.tree.map(lambda x: _with(x, alone), tree)
        mesh = Mesh(np.array(devices).reshape(self.mesh), AXES)

        def split(x: Any) -> Any:
            return _with(x, NamedSharding(mesh, self._spec(x.shape)))

        return jax.tree.map(split, tree)

    def _spec(self, shape: tuple[int, ...]) -> PartitionSpec:
        """A matrix by `fsdp` and `tensor`; what is none, one axis by both; numbers everywhere.

        So every norm is added over all devices. Sums over different devices cannot travel together
        under automatic partitioning (only where `update` is told `partition_specs`).
        """
        last = range(len(shape))[-2:]
        if len(last) == 2 and all(
            shape[k] % n == 0 and shape[k] >= 64 for k, n in zip(last, self.mesh, strict=True)
        ):
            return PartitionSpec(*[None] * (len(shape) - 2), *AXES)
        for axis in reversed(range(len(shape))):
            if shape[axis] % self.number == 0:
                return PartitionSpec(*[None] * axis, AXES)
        return PartitionSpec()


def _with(x: Any, sharding: jax.sharding.Sharding) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


TARGETS = {
    "one H100": Target("cuda", "h100"),
    "eight H100": Target("cuda", "h100", (4, 2)),
    "one v5e": Target("tpu", "v5e:2x4"),
    "v5e 2x4": Target("tpu", "v5e:2x4", (4, 2)),
    "v5e 16x16": Target("tpu", "v5e:16x16", (64, 4)),
    "one v6e": Target("tpu", "v6e:2x4"),
    "v6e 2x4": Target("tpu", "v6e:2x4", (4, 2)),
    "one v5p": Target("tpu", "v5p:2x2x2"),
    "v5p 2x2x2": Target("tpu", "v5p:2x2x2", (4, 2)),
}
