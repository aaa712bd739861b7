"""A transformer in Flax nnx and MuonH: FSDP, scanned layers and accumulation.

    python examples/program_nnx.py

It trains on the source of Python's standard library, on all devices that there are.
"""

import os
from pathlib import Path

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import optax_largebatch as lb

jax.config.update("jax_num_cpu_devices", 8)  # to try it without GPUs or TPUs
LAYERS, WIDTH, HEADS, LENGTH, BATCH, MICRO_BATCHES, STEPS = 4, 64, 4, 32, 16, 4, 30
mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(AxisType.Auto,))
by_example = NamedSharding(mesh, P("fsdp"))
BY_COLUMN, UNNAMED = (None, "fsdp"), {nnx.PARTITION_NAME: None}


def linear(inputs, outputs, rngs, **options):
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), BY_COLUMN)
    return nnx.Linear(inputs, outputs, kernel_init=init, rngs=rngs, **options)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.attention_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.qkv = linear(WIDTH, 3 * WIDTH, rngs)
        self.out = linear(WIDTH, WIDTH, rngs)
        self.mlp_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = linear(WIDTH, 4 * WIDTH, rngs)
        self.down = linear(4 * WIDTH, WIDTH, rngs)

    def __call__(self, x):
        x = jax.lax.with_sharding_constraint(x, by_example)
        qkv = self.qkv(self.attention_norm(x)).reshape(*x.shape[:2], HEADS, -1)
        mixed = jax.nn.dot_product_attention(*jnp.split(qkv, 3, -1), is_causal=True)
        x += self.out(mixed.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class Transformer(nnx.Module):
    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.normal(0.1), BY_COLUMN)
        self.embed = nnx.Embed(256, WIDTH, embedding_init=init, rngs=rngs)
        layers = nnx.vmap(Layer, transform_metadata=UNNAMED)
        self.layers = nnx.split_rngs(splits=LAYERS)(layers)(rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = linear(WIDTH, 256, rngs, use_bias=False)

    def __call__(self, tokens):
        options = {"out_axes": nnx.Carry, "transform_metadata": UNNAMED}
        through = nnx.scan(lambda x, layer: layer(x), **options)
        return self.head(self.norm(through(self.embed(tokens), self.layers)))


def make():
    model = Transformer(nnx.Rngs(0))
    rate = lb.warmup_decay(0.02, total_steps=STEPS, warmup_steps=3)
    muonh = lb.muonh(
        rate,
        matrix_mask=~lb.matching("embed"),
        adamh_mask=lb.matching("head"),
        matrix_axes={"qkv/kernel": f"layers rows ({3 * HEADS} columns)"},
        stacked={"layers/": 0},
    )
    accumulated = lb.accumulate_gradients(muonh, every=MICRO_BATCHES)
    shardings = nnx.get_named_sharding(nnx.state(model, nnx.Param), mesh)
    told = lb.with_partition_specs(accumulated, shardings)
    return model, nnx.Optimizer(model, told, wrt=nnx.Param)


# Shapes come first, so that no device ever holds the whole model.
jax.set_mesh(mesh)
graph, shapes = nnx.split(nnx.eval_shape(make))
shardings = nnx.get_named_sharding(shapes, mesh)
start = jax.jit(lambda: nnx.state(make()), out_shardings=shardings)()
model, optimizer = nnx.merge(graph, start)


@nnx.jit(donate_argnums=(0, 1))
def step(model, optimizer, tokens):
    def loss_of(model):
        logits, labels = model(tokens[:, :-1]), tokens[:, 1:]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean()

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


files = sorted(Path(os.__file__).parent.glob("*.py"))
text = np.frombuffer(b"".join(map(Path.read_bytes, files)), np.uint8)
rng = np.random.default_rng(0)
for number in range(1, STEPS * MICRO_BATCHES + 1):
    starts = rng.integers(len(text) - LENGTH, size=(BATCH, 1))
    tokens = text[starts + np.arange(LENGTH + 1)].astype(np.int32)
    loss = step(model, optimizer, jax.device_put(tokens, by_example))
    if number % MICRO_BATCHES == 0:
        print(f"step {number // MICRO_BATCHES:2}  loss {loss:.3f}")
