"""A small convolutional network that names the digits of noisy images, those of scikit-learn."""

import hashlib
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from benchmarks.tuned.bert import dense, layer_norm, linear, norm

NARROW, WIDE = 24, 48
NOISE = 0.5  # its deviation; a pixel is from 0 to 1
Examples = tuple[jax.Array, jax.Array]


def windows(x: jax.Array) -> jax.Array:
    """The values in the 3x3 pixels around each pixel, so that a convolution is a matrix."""
    rows, columns = x.shape[1:3]
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    shifts = itertools.product(range(3), repeat=2)
    return jnp.concatenate([padded[:, i : i + rows, j : j + columns] for i, j in shifts], axis=-1)


def residual(x: jax.Array, layer: dict[str, Any]) -> jax.Array:
    """A convolution and a linear layer after a norm, added to their input."""
    hidden = jax.nn.relu(dense(windows(layer_norm(x, layer["norm"])), layer["convolution"]))
    return x + dense(hidden, layer["mix"])


class Digits:
    """Cross-entropy of the digit, with noise over every image and up to a pixel of shift."""

    micro_batch, stacked = 16, None

    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        self.data = f"sha256 {hashlib.sha256(images.tobytes()).hexdigest()}"
        order = np.random.default_rng(0).permutation(len(labels))
        self.images = jnp.asarray(images[order].reshape(-1, 8, 8) / 16, "float32")
        self.labels = jnp.asarray(labels[order])
        self.validation, self.test = (
            self._noisy(jax.random.key(0), jnp.repeat(part, 4))
            for part in (jnp.arange(1197, 1437), jnp.arange(1437, 1797))
        )

    def init(self, key: jax.Array) -> Any:
        """Normal numbers, in the output of a branch smaller; scales of 1, biases of 0."""
        keys = iter(jax.random.split(key, 7))

        def block(width: int) -> dict[str, Any]:
            return {
                "norm": norm(width),
                "convolution": linear(next(keys), 9 * width, width),
                "mix": linear(next(keys), width, width, 0.5),
            }

        return {
            "embedding": linear(next(keys), 9, NARROW),
            "narrow": block(NARROW),
            "merge": linear(next(keys), 9 * NARROW, WIDE),
            "wide": block(WIDE),
            "norm": norm(WIDE),
            "head": linear(next(keys), WIDE, 10),
        }

    def examples(self, key: jax.Array, start: jax.Array) -> Examples:
        """The micro-batch that begins with training example number `start`: random images."""
        chosen, rest = jax.random.split(jax.random.fold_in(key, start))
        return self._noisy(rest, jax.random.randint(chosen, (self.micro_batch,), 0, 1197))

    def _noisy(self, key: jax.Array, chosen: jax.Array) -> Examples:
        for_shifts, for_noise = jax.random.split(key)
        shifts = jax.random.randint(for_shifts, (len(chosen), 2), -1, 2)
        shifted = jax.vmap(lambda x, own: jnp.roll(x, own, (0, 1)))(self.images[chosen], shifts)
        noise = NOISE * jax.random.normal(for_noise, shifted.shape)
        return shifted + noise, self.labels[chosen]

    def loss(self, params: Any, examples: Examples) -> jax.Array:
        """The cross-entropy of the digits."""
        images, labels = examples
        x = dense(windows(images[..., None]), params["embedding"])
        x = windows(residual(x, params["narrow"]))[:, ::2, ::2]
        x = residual(dense(x, params["merge"]), params["wide"])
        x = layer_norm(x, params["norm"]).mean(axis=(1, 2))
        logits = dense(x, params["head"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
