"""A byte-level BERT whose layers are scanned and whose parameters say how they are split."""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

MASK = 256  # the token of a masked byte, after those of the 256 bytes


def split(init: nn.initializers.Initializer, *axes: str | None) -> nn.initializers.Initializer:
    """Says along which axes of the mesh a parameter is split; `nn.get_partition_spec` reads it."""
    return nn.with_partitioning(init, axes)


class Layer(nn.Module):
    """Attention and a multilayer perceptron, each after a norm and beside a residual branch."""

    heads: int
    dtype: jax.typing.DTypeLike
    activations: jax.sharding.Sharding

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        """The input of the next layer, from x of shape (sequences, length, width)."""
        width = x.shape[-1]
        x = jax.lax.with_sharding_constraint(x, self.activations)
        normed = self.norm("attention_norm", x)
        # Widening kernels are split by columns over `tensor`, narrowing ones by rows, so that
        # nothing has to travel between the two.
        query, key, value = (
            self.dense(name, normed, width, ("fsdp", "tensor"), use_bias=False).reshape(
                *x.shape[:-1], self.heads, -1
            )
            for name in ("query", "key", "value")
        )
        mixed = jax.nn.dot_product_attention(query, key, value).reshape(x.shape)
        x = x + self.dense("output", mixed, width, ("tensor", "fsdp"))
        hidden = self.dense("up", self.norm("mlp_norm", x), 4 * width, ("fsdp", "tensor"))
        return x + self.dense("down", nn.gelu(hidden), width, ("tensor", "fsdp")), None

    def dense(
        self, name: str, x: jax.Array, features: int, axes: Sequence[str], use_bias: bool = True
    ) -> jax.Array:
        """A linear layer."""
        return nn.Dense(
            features,
            use_bias=use_bias,
            dtype=self.dtype,
            param_dtype=self.dtype,
            kernel_init=split(nn.initializers.lecun_normal(), *axes),
            name=name,
        )(x)

    def norm(self, name: str, x: jax.Array) -> jax.Array:
        """A layer norm, whose mean and variance are taken in float32."""
        return nn.LayerNorm(dtype=self.dtype, param_dtype=self.dtype, name=name)(x)


class Bert(nn.Module):
    """A network that predicts the bytes at masked positions."""

    layers: int
    width: int
    heads: int
    dtype: jax.typing.DTypeLike  # of parameters and activations
    activations: jax.sharding.Sharding  # how these are split, (sequences, length, width)

    @nn.compact
    def __call__(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """Logits, (sequences, positions, 256), of tokens, (sequences, length)."""
        own = {"dtype": self.dtype, "param_dtype": self.dtype}
        table = split(nn.initializers.normal(1.0), None, "fsdp")
        x = nn.Embed(MASK + 1, self.width, embedding_init=table, name="bytes", **own)(tokens)
        places = jnp.arange(tokens.shape[-1])
        x = x + nn.Embed(
            tokens.shape[-1], self.width, embedding_init=table, name="positions", **own
        )(places)
        stack = nn.scan(
            Layer,
            length=self.layers,
            variable_axes={"params": 0},  # the layers' parameters are stacked along axis 0
            split_rngs={"params": True},
            metadata_params={nn.PARTITION_NAME: None},  # and are not split along it
        )
        x, _ = stack(self.heads, self.dtype, self.activations, name="layers")(x, None)
        x = nn.LayerNorm(name="norm", **own)(x)
        x = jnp.take_along_axis(x, positions[..., None], axis=1)
        head = split(nn.initializers.lecun_normal(), "fsdp", "tensor")
        return nn.Dense(MASK, kernel_init=head, name="head", **own)(x)
