"""Adapters of low rank on a network of two layers that has to follow another one."""

from typing import Any

import jax
import jax.numpy as jnp


class Adapters:
    """The squared distance from the teacher, over that without adapters.

    The weights of the teacher are apart from those of the network by matrices of a higher rank than
    that of the adapters, whose norm is about `apart` times that of the weights.
    """

    micro_batch, stacked = 256, None

    def __init__(self, apart: float, width: int = 64, rank: int = 4, held_out: int = 2048) -> None:
        keys = jax.random.split(jax.random.key(0), 5)
        self.rank, self.shape = rank, (self.micro_batch, width)
        self.weights = jax.random.normal(keys[0], (2, width, width)) / width**0.5
        left, right = (jax.random.normal(key, (2, width, 2 * rank)) for key in keys[1:3])
        self.teacher = self.weights + apart * left @ right.mT / (2 * rank * width) ** 0.5
        self.data = f"a teacher {apart:g} away, rank {2 * rank}"
        self.validation, self.test = (jax.random.normal(x, (held_out, width)) for x in keys[3:])

    def init(self, key: jax.Array) -> Any:
        """For each layer a random matrix and one of zeros; and the bias of the last layer."""
        _, width = self.shape
        layers = [
            {
                "first": {"kernel": jax.random.normal(own, (width, self.rank)) / width**0.5},
                "second": {"kernel": jnp.zeros((self.rank, width))},
            }
            for own in jax.random.split(key)
        ]
        return {"layers": layers, "head": {"bias": jnp.zeros(width)}}

    def examples(self, key: jax.Array, start: jax.Array) -> jax.Array:
        """The micro-batch that begins with training example number `start`."""
        return jax.random.normal(jax.random.fold_in(key, start), self.shape)

    def loss(self, params: Any, x: jax.Array) -> jax.Array:
        """The relative distance."""
        changes = [own["first"]["kernel"] @ own["second"]["kernel"] for own in params["layers"]]
        networks = (self.weights + jnp.stack(changes), self.weights, self.teacher)
        now, before, target = (jax.nn.relu(x @ first) @ last for first, last in networks)
        now += params["head"]["bias"]
        return jnp.mean(jnp.square(now - target)) / jnp.mean(jnp.square(before - target))
