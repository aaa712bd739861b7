"""A byte-level BERT that reads the source code of Python's standard library."""

import functools
import hashlib
from pathlib import Path
import sysconfig
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_largebatch as lb

STRETCH = 8  # in each such stretch one byte is masked
MASK = 256  # the token of a masked byte
SHORTEST = 16  # bytes of a file that is read


class Sizes(NamedTuple):
    """The size of the network."""

    layers: int
    width: int
    heads: int
    length: int
    """Bytes in an example."""
    micro_batch: int
    """Examples in a micro-batch; the gradient of a batch is the mean over its micro-batches."""
    stacked: bool
    """Whether the layers are in one array each, and scanned."""


SMALL = Sizes(2, 32, 2, 16, 32, stacked=False)


class Examples(NamedTuple):
    """Windows of the text and what is masked in them."""

    windows: jax.Array  # (examples, length), bytes
    masked: jax.Array  # (examples, length // STRETCH), positions


@functools.cache
def library_text() -> dict[str, np.ndarray]:
    """The bytes of the standard library's files in three parts, each file once, as its hash says.

    A file's part is chosen by its content, so copies cannot be in two parts.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = {
        hashlib.sha256(content).digest(): content
        for path in sorted(root.rglob("*.py"))
        if not {"site-packages", "dist-packages", "test", "tests"} & set(path.parts)
        and len(content := path.read_bytes()) >= SHORTEST
    }
    parts: dict[str, list[bytes]] = {"train": [], "validation": [], "test": []}
    for digest in sorted(files):
        part = {0: "validation", 1: "test"}.get(digest[0] % 16, "train")
        parts[part].append(files[digest])
    return {name: np.frombuffer(b"".join(files), np.uint8) for name, files in parts.items()}


def layer_norm(x: jax.Array, norm: dict[str, jax.Array]) -> jax.Array:
    """A layer norm: mean 0 and variance 1, then a scale and a bias."""
    x = x - x.mean(axis=-1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
    return x * norm["scale"] + norm["bias"]


def dense(x: jax.Array, layer: dict[str, jax.Array]) -> jax.Array:
    """A linear layer."""
    return x @ layer["kernel"] + layer["bias"]


def linear(key: jax.Array, rows: int, columns: int, scale: float = 1.0) -> dict[str, jax.Array]:
    """The parameters of a linear layer at the start."""
    kernel = scale / rows**0.5 * jax.random.normal(key, (rows, columns))
    return {"kernel": kernel, "bias": jnp.zeros(columns)}


def norm(width: int) -> dict[str, jax.Array]:
    """The parameters of a layer norm at the start."""
    return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}


def attention(x: jax.Array, layer: dict[str, Any], heads: int, causal: bool) -> jax.Array:
    """Self-attention, of every byte to every byte, or to those before it and itself."""
    queries, keys, values = (
        dense(x, layer[name]).reshape(*x.shape[:-1], heads, -1)
        for name in ("query", "key", "value")
    )
    mixed = jax.nn.dot_product_attention(queries, keys, values, is_causal=causal)
    return dense(mixed.reshape(x.shape), layer["output"])


def transformer_layer(
    x: jax.Array, layer: dict[str, Any], heads: int, causal: bool = False
) -> jax.Array:
    """Attention and a multilayer perceptron, each after a norm and added to its input."""
    x = x + attention(layer_norm(x, layer["attention_norm"]), layer, heads, causal)
    hidden = jax.nn.relu(dense(layer_norm(x, layer["mlp_norm"]), layer["up"]))
    return x + dense(hidden, layer["down"])


class Bert:
    """Cross-entropy of the masked bytes, in windows from anywhere in the training files."""

    causal = False
    """Whether a byte sees only those before it."""

    def __init__(self, sizes: Sizes, held_out: int) -> None:
        self.sizes, self.micro_batch = sizes, sizes.micro_batch
        self.stacked = lb.stacked_layers({"layers/": 0}) if sizes.stacked else None
        text = library_text()
        self.data = f"sha256 {hashlib.sha256(b''.join(map(bytes, text.values()))).hexdigest()}"
        self.training = jnp.asarray(text["train"])
        self.validation, self.test = (
            self._examples(jax.random.key(0), jnp.asarray(text[part]), held_out)
            for part in ("validation", "test")
        )

    def init(self, key: jax.Array) -> Any:
        """Normal numbers, in the output of a branch smaller; scales of 1, biases of 0."""
        width, count = self.sizes.width, self.sizes.layers
        keys = iter(jax.random.split(key, 3 + 6 * count))

        def normal(*shape: int) -> jax.Array:
            return jax.random.normal(next(keys), shape)

        def layer(*shape: Any) -> dict[str, jax.Array]:
            return linear(next(keys), *shape)

        branch = (2 * count) ** -0.5
        embedding = {"byte": normal(MASK + 1, width), "position": normal(self.sizes.length, width)}
        layers = [
            {
                **{name: layer(width, width) for name in ("query", "key", "value")},
                "output": layer(width, width, branch),
                "up": layer(width, 4 * width),
                "down": layer(4 * width, width, branch),
                "attention_norm": norm(width),
                "mlp_norm": norm(width),
            }
            for _ in range(count)
        ]
        stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers) if self.stacked else layers
        return {
            "embedding": embedding,
            "layers": stack,
            "norm": norm(width),
            "head": layer(width, MASK),
        }

    def examples(self, key: jax.Array, start: jax.Array) -> Examples:
        """The micro-batch that begins with training example number `start`: random windows."""
        return self._examples(jax.random.fold_in(key, start), self.training, self.micro_batch)

    def _examples(self, key: jax.Array, text: jax.Array, count: int) -> Examples:
        length = self.sizes.length
        for_windows, for_masks = jax.random.split(key)
        begins = jax.random.randint(for_windows, (count,), 0, len(text) - length)
        windows = text[begins[:, None] + jnp.arange(length)[None, :]]
        stretches = jnp.arange(0, length, STRETCH)
        chosen = jax.random.randint(for_masks, (count, len(stretches)), 0, STRETCH)
        return Examples(windows, stretches[None, :] + chosen)

    def hidden(self, params: Any, tokens: jax.Array) -> jax.Array:
        """What comes out of the last layer, for every token."""
        layer_of = functools.partial(transformer_layer, heads=self.sizes.heads, causal=self.causal)
        x = params["embedding"]["byte"][tokens] + params["embedding"]["position"]
        if self.stacked:
            x, _ = jax.lax.scan(lambda x, layer: (layer_of(x, layer), None), x, params["layers"])
        else:
            for layer in params["layers"]:
                x = layer_of(x, layer)
        return x

    def loss(self, params: Any, examples: Examples) -> jax.Array:
        """The cross-entropy of the masked bytes."""
        rows = jnp.arange(len(examples.windows))[:, None]
        windows = examples.windows.astype(jnp.int32)
        x = self.hidden(params, windows.at[rows, examples.masked].set(MASK))
        logits = dense(layer_norm(x[rows, examples.masked], params["norm"]), params["head"])
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, windows[rows, examples.masked]
        ).mean()
