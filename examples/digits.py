"""The handwritten digits of scikit-learn, a network that reads them, and rates that suit it."""

import math
from typing import NamedTuple

from flax import nnx
import jax
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


class Examples(NamedTuple):
    """Images and the digits that they show."""

    images: np.ndarray  # (examples, 8, 8, 1), from 0 to 1
    labels: np.ndarray  # (examples,), from 0 to 9


class Data(NamedTuple):
    """Three parts, each with about the same share of every digit."""

    train: Examples
    validation: Examples
    test: Examples


def load_data() -> Data:
    """The 1797 digits of scikit-learn, split in the same way every time."""
    digits = load_digits()
    rest = Examples(
        (digits.images[..., None] / 16).astype(np.float32), digits.target.astype(np.int32)
    )
    rest, test = hold_out(rest, 300)
    train, validation = hold_out(rest, 300)
    return Data(train, validation, test)


def hold_out(examples: Examples, size: int) -> tuple[Examples, Examples]:
    """All but `size` examples, and those `size` examples."""
    images, held_images, labels, held_labels = train_test_split(
        *examples, test_size=size, stratify=examples.labels, random_state=0
    )
    return Examples(images, labels), Examples(held_images, held_labels)


def shuffled(num_examples: int, length: int, seed: int) -> np.ndarray:
    """The order of training, (length,): epoch after epoch, each shuffled.

    It does not depend on the batch size, so that all runs of a seed see the same examples.
    """
    rng = np.random.default_rng(seed)
    epochs = math.ceil(length / num_examples)
    return np.concatenate([rng.permutation(num_examples) for _ in range(epochs)])[:length]


class ConvNet(nnx.Module):
    """Two convolutions and a linear layer.

    The norms are group norms. A batch norm would mix the examples of a micro-batch, so the mean
    gradient of many micro-batches would differ from that of one large batch.
    """

    def __init__(self, rngs: nnx.Rngs) -> None:
        every = {"kernel_init": jax.nn.initializers.he_normal(), "rngs": rngs}
        self.conv1 = nnx.Conv(1, 16, (3, 3), **every)
        self.norm1 = nnx.GroupNorm(16, num_groups=4, rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), **every)
        self.norm2 = nnx.GroupNorm(32, num_groups=4, rngs=rngs)
        self.linear = nnx.Linear(2 * 2 * 32, 10, **every)

    def __call__(self, images: jax.Array) -> jax.Array:
        """The logits, (examples, 10), of images, (examples, 8, 8, 1)."""
        x = nnx.relu(self.norm1(self.conv1(images)))
        x = nnx.avg_pool(x, (2, 2), strides=(2, 2))
        x = nnx.relu(self.norm2(self.conv2(x)))
        x = nnx.avg_pool(x, (2, 2), strides=(2, 2))
        return self.linear(x.reshape(len(x), -1))


class Settings(NamedTuple):
    """The settings of an optimizer."""

    small_rate: float  # at a batch of 32
    large_rate: float  # at a batch of 1024
    momentum: float
    weight_decay: float


# The rates of the first four come from the same coarse grid, two values for each factor of ten, in
# `benchmarks/results/cpu-2-cores/digits_rates.csv`, made by `tune_digits.py`. A finer grid would
# find a little more, and the rate of MuonH at 32 is the largest of the grid. A momentum of 0.8
# takes fewer steps than 0.9 on these digits for AdamW, LAMB, LANS and Muon. The last three had the
# same grid with their momentum. Weight decays are customary values and were not tuned.
DEFAULTS = {
    "adamw": Settings(1e-1, 3e-2, 0.8, 1e-2),
    "lamb": Settings(3e-2, 1e-1, 0.8, 1e-2),
    "lans": Settings(1e-1, 1e-1, 0.8, 1e-2),
    "muonh": Settings(3e-1, 1e-1, 0.8, 0.0),
    "lars": Settings(3e-2, 1e-1, 0.9, 1e-4),
    "larc": Settings(3e-1, 3e-1, 0.9, 1e-4),
    "lbsgd": Settings(1e-1, 3e-1, 0.9, 1e-4),
}


def default_rate(name: str, batch_size: float) -> float:
    """The learning rate at a batch size: a power law through the two rates of the table."""
    small, large = DEFAULTS[name][:2]
    return small * (large / small) ** (math.log(batch_size / 32) / math.log(1024 / 32))
