"""A byte-level causal language model of the source code of Python's standard library."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.tuned import bert
from benchmarks.tuned.bert import MASK, Bert, dense, layer_norm

BEGIN = MASK  # the token before the first byte of a window; nothing is masked here
SMALL = bert.SMALL._replace(layers=4, width=24, stacked=True)


class CausalModel(Bert):
    """Cross-entropy of each byte of a window, given the bytes before it."""

    causal = True

    def _examples(self, key: jax.Array, text: jax.Array, count: int) -> jax.Array:
        length = self.sizes.length
        begins = jax.random.randint(key, (count,), 0, len(text) - length)
        return text[begins[:, None] + jnp.arange(length)[None, :]]

    def loss(self, params: Any, examples: jax.Array) -> jax.Array:
        """The cross-entropy of all bytes."""
        tokens = examples.astype(jnp.int32)
        before = jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)), constant_values=BEGIN)
        x = layer_norm(self.hidden(params, before), params["norm"])
        logits = dense(x, params["head"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()
