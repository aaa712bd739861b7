"""What an optimizer is measured on: a network, its data and its loss."""

from typing import Any, Protocol

import jax

import optax_largebatch as lb


class Task(Protocol):
    """What a run needs of a network; `Bert` and `Adapters` are two."""

    micro_batch: int
    """Examples in a micro-batch; the gradient of a batch is the mean over its micro-batches."""
    stacked: lb.Stacked | None
    """The axes of layers that are in one array each, as an optimizer of this library takes them."""
    validation: Any
    """Examples that choose the settings."""
    test: Any
    """Examples whose loss is reported."""
    data: str
    """What the examples are, in words or as a hash: a table of runs has no two of them."""

    def init(self, key: jax.Array) -> Any:
        """The parameters at the start."""

    def examples(self, key: jax.Array, start: jax.Array) -> Any:
        """The micro-batch that begins with training example number `start`."""

    def loss(self, params: Any, examples: Any) -> jax.Array:
        """The mean loss of some examples."""
        ...
