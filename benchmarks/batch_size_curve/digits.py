"""Scikit-learn's handwritten digits and a multilayer perceptron."""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

WIDTHS = (64, 64, 64, 10)
TEST, VALIDATION = 387, 386  # held out; 1024 examples are left
MOST_EXAMPLES, MOST_STEPS = 200 * 1024, 3000  # of a trial


class Examples(NamedTuple):
    """Images and the digits that they show."""

    images: jax.Array  # (examples, 64), from 0 to 1
    labels: jax.Array  # (examples,), from 0 to 9


class Digits:
    """Cross-entropy on 1024 training examples, shuffled anew in each epoch."""

    warmup_steps = 5
    micro_batch = 16
    stacked = None

    def __init__(self, target: float) -> None:
        self.target = target
        images, labels = load_digits(return_X_y=True)
        rest = (images / 16).astype(np.float32), labels.astype(np.int32)
        parts = []
        for held_out in (TEST, VALIDATION):
            images, held_images, labels, held_labels = train_test_split(
                *rest, test_size=held_out, stratify=rest[1], random_state=0
            )
            rest = images, labels
            parts.append(Examples(jnp.asarray(held_images), jnp.asarray(held_labels)))
        self.test, self.validation = parts
        self.training = Examples(*map(jnp.asarray, rest))

    def init(self, key: jax.Array) -> Any:
        """Kernels of He's size, biases of 0."""
        kernel = jax.nn.initializers.he_normal()
        return [
            {"kernel": kernel(own, shape), "bias": jnp.zeros(shape[1])}
            for own, shape in zip(
                jax.random.split(key, len(WIDTHS) - 1), itertools.pairwise(WIDTHS), strict=True
            )
        ]

    def limit(self, batch_size: int) -> int:
        """The steps after which a trial is given up."""
        return min(MOST_STEPS, MOST_EXAMPLES // batch_size)

    def stream(self, key: jax.Array) -> jax.Array:
        """Epoch after epoch, each shuffled."""
        size = len(self.training.labels)
        keys = jax.random.split(key, MOST_EXAMPLES // size)
        return jax.lax.map(lambda own: jax.random.permutation(own, size), keys).ravel()

    def examples(self, stream: jax.Array, start: jax.Array) -> Examples:
        """The next of the epochs."""
        chosen = jax.lax.dynamic_slice_in_dim(stream, start, self.micro_batch)
        return Examples(self.training.images[chosen], self.training.labels[chosen])

    def loss(self, params: Any, examples: Examples) -> jax.Array:
        """The cross-entropy."""
        x = examples.images
        for layer in params[:-1]:
            x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
        logits = x @ params[-1]["kernel"] + params[-1]["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, examples.labels).mean()
