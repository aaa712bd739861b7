"""Optimizers of PyTorch, timm, pytorch_optimizer and Apex, to be timed where they are installed.

They are not among the requirements of anything here:

    pip install torch timm pytorch_optimizer

Apex is built from its source, and its optimizers run on NVIDIA's cards alone. Where PyTorch sees a
card, all of them run there.
"""

from collections.abc import Callable
import dataclasses
import importlib
import time
from typing import Any, NamedTuple

import jax
import numpy as np


class Peer(NamedTuple):
    """An optimizer of another library."""

    module: str
    name: str
    floor: int
    """Bytes for each float32 parameter, as for those of `optimizers.py`."""
    options: dict[str, Any]

    @property
    def is_installed(self) -> bool:
        """Whether it can be imported."""
        try:
            importlib.import_module(self.module)
        except ImportError:
            return False
        return True

    def build(self, parameters: list[Any]) -> Any:
        """The optimizer of these parameters."""
        make: Callable[..., Any] = getattr(importlib.import_module(self.module), self.name)
        return make(parameters, lr=1e-3, weight_decay=0.01, **self.options)


PEERS = {
    "torch.AdamW, fused": Peer("torch.optim", "AdamW", 28, {"fused": True}),
    "timm.Lamb": Peer("timm.optim", "Lamb", 40, {}),
    "timm.Lars": Peer("timm.optim", "Lars", 28, {}),
    "pytorch_optimizer.Lamb": Peer("pytorch_optimizer", "Lamb", 40, {}),
    "apex.FusedLAMB": Peer("apex.optimizers", "FusedLAMB", 44, {}),  # with its global norm
}


@dataclasses.dataclass
class RunningPeer:
    """An optimizer of PyTorch with what it works on."""

    optimizer: Any
    wait: Callable[[], None]
    """Returns when all work that was begun is done."""

    def run(self) -> float:
        """Takes a step, in place, and returns how many seconds it took."""
        start = time.perf_counter()
        self.optimizer.step()
        self.wait()
        return time.perf_counter() - start


def running_peer(peer: Peer, params: Any, gradients: Any) -> RunningPeer:
    """The optimizer with copies of the parameters and gradients."""
    import torch

    on_a_card = torch.cuda.is_available()

    def tensor(array: jax.Array) -> Any:
        own = torch.from_numpy(np.array(array, "float32"))
        return own.to("cuda" if on_a_card else "cpu", getattr(torch, str(array.dtype)))

    parameters = []
    for param, gradient in zip(jax.tree.leaves(params), jax.tree.leaves(gradients), strict=True):
        parameters.append(torch.nn.Parameter(tensor(param)))
        parameters[-1].grad = tensor(gradient)
    return RunningPeer(
        peer.build(parameters), torch.cuda.synchronize if on_a_card else lambda: None
    )
