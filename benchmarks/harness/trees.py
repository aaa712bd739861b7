"""The parameters of networks: their shapes, and numbers of these shapes."""

from collections.abc import Callable, Mapping, Sequence
import itertools
from typing import Any, NamedTuple

import jax
import numpy as np

Shape = tuple[int, ...]


def dense(rows: int, columns: int) -> dict[str, Shape]:
    """A linear layer."""
    return {"kernel": (rows, columns), "bias": (columns,)}


def perceptron(widths: Sequence[int]) -> list[dict[str, Shape]]:
    """A multilayer perceptron."""
    return [dense(*shape) for shape in itertools.pairwise(widths)]


def encoder_layer(width: int) -> dict[str, dict[str, Shape]]:
    """The linear layers of attention and of what follows it."""
    return {
        **{name: dense(width, width) for name in ("query", "key", "value", "output")},
        "up": dense(width, 4 * width),
        "down": dense(4 * width, width),
    }


def bert(layers: int, width: int, vocabulary: int = 30522) -> dict[str, Any]:
    """A BERT encoder; 12 layers of 768 make BERT-base, 24 of 1024 BERT-large."""
    norm = {"scale": (width,), "bias": (width,)}
    layer = {**encoder_layer(width), "attention_norm": norm, "output_norm": norm}
    return {
        "embeddings": {"word": (vocabulary, width), "position": (512, width), "type": (2, width)},
        "embeddings_norm": norm,
        **{f"layer_{index}": layer for index in range(layers)},
        "pooler": dense(width, width),
        "head": {**dense(width, width), "norm": norm, "output_bias": (vocabulary,)},
    }


def stacked_bert(layers: int, width: int) -> dict[str, Any]:
    """The same network as `flax.linen.scan` holds it: all layers in the arrays of one."""
    shapes = bert(layers, width)
    layer = shapes["layer_0"]
    rest = {name: own for name, own in shapes.items() if not name.startswith("layer_")}
    stack = jax.tree.map(lambda shape: (layers, *shape), layer, is_leaf=is_shape)
    return {**rest, "layers": stack}


def transformer(width: int, layers: int = 6, vocabulary: int = 1024) -> dict[str, Any]:
    """A small transformer, whose axes all split over eight devices; 6 layers have 78 leaves."""
    return {
        **{f"layer_{index}": encoder_layer(width) for index in range(layers)},
        "embedding": {"tokens": (vocabulary, width), "positions": (64, width)},
        "norm": {"scale": (width,), "bias": (width,)},
        "head": dense(width, vocabulary),
    }


def small_leaves(count: int = 300, distinct: int = 20) -> dict[str, Shape]:
    """Leaves of a thousand to a hundred thousand elements, of so many distinct shapes."""
    sizes = np.geomspace(1e3, 1e5, distinct).astype(int)
    return {f"leaf_{index}": (int(sizes[index % distinct]),) for index in range(count)}


def is_shape(node: Any) -> bool:
    """Whether a node of a tree of shapes is a shape."""
    return isinstance(node, tuple)


def arrays(shapes: Any, dtype: str = "float32") -> Any:
    """Normal numbers of the size of weights, the same for the same shapes."""
    keys = map(jax.random.key, itertools.count())
    return jax.tree.map(
        lambda shape: (0.02 * jax.random.normal(next(keys), shape)).astype(dtype),
        shapes,
        is_leaf=is_shape,
    )


class Tree(NamedTuple):
    """The parameters of a network."""

    shapes: Callable[[], dict[str, Any]]
    dtype: str = "float32"
    stacked: Mapping[str, int] | None = None
    """The rules of `stacked_layers`, where layers are stacked."""

    def arrays(self) -> Any:
        """Numbers to begin with, and to take for gradients."""
        return arrays(self.shapes(), self.dtype)


TREES = {
    "bert-base": Tree(lambda: bert(12, 768)),
    "bert-base, bfloat16": Tree(lambda: bert(12, 768), "bfloat16"),
    "bert-base, stacked": Tree(lambda: stacked_bert(12, 768), stacked={"^layers/": 0}),
    "bert-large": Tree(lambda: bert(24, 1024)),
    "1.3B, stacked": Tree(lambda: stacked_bert(24, 2048), stacked={"^layers/": 0}),
    "small": Tree(small_leaves),
    "1000 leaves": Tree(lambda: small_leaves(1000)),
    "tiny": Tree(lambda: bert(1, 32, 256)),  # shows in seconds that a command works
}
