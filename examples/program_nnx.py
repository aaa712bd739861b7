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


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.attention_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = jax.lax.with_sharding_constraint(x, by_example)
        qkv = self.qkv(self.attention_norm(x)).reshape(*x.shape[:2], HEADS, -1)
        mixed = jax.nn.dot_product_attention(*jnp.split(qkv, 3, -1), is_causal=True)
        x += self.out(mixed.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class Transformer(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(256, WIDTH, rngs=rngs)
        self.layers = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Layer))(rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 256, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        through = nnx.scan(lambda x, layer: layer(x), out_axes=nnx.Carry)
        return self.head(self.norm(through(self.embed(tokens), self.layers)))


def split_last_axis(x):
    return NamedSharding(mesh, P(*[None] * (x.ndim - 1), "fsdp"))


def make():
    return Transformer(nnx.Rngs(0))


# Shapes come first, so that no device ever holds the whole model.
graph, shapes = nnx.split(nnx.eval_shape(make))
shardings = jax.tree.map(split_last_axis, shapes)
params = jax.jit(lambda: nnx.state(make()), out_shardings=shardings)()

rate = lb.warmup_polynomial(0.02, total_steps=STEPS, warmup_steps=3)
optimizer = lb.muonh(
    rate,
    matrix_mask=lb.excluding("embed"),
    adamh_mask=lb.matching("head"),
    stacked={"layers/": 0},
)
optimizer = lb.accumulate_gradients(optimizer, every=MICRO_BATCHES)
optimizer = lb.with_partition_specs(optimizer, shardings)
state_shardings = lb.shard_optimizer_state(optimizer, params, mesh)
state = jax.jit(optimizer.init, out_shardings=state_shardings)(params)


def loss_of(params, tokens):
    logits = nnx.merge(graph, params)(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


def step(params, state, tokens):
    loss, grads = jax.value_and_grad(loss_of)(params, tokens)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


results = shardings, state_shardings, None
step = jax.jit(step, donate_argnums=(0, 1), out_shardings=results)

files = sorted(Path(os.__file__).parent.glob("*.py"))
text = np.frombuffer(b"".join(map(Path.read_bytes, files)), np.uint8)
rng = np.random.default_rng(0)
for number in range(1, STEPS * MICRO_BATCHES + 1):
    starts = rng.integers(len(text) - LENGTH, size=(BATCH, 1))
    tokens = text[starts + np.arange(LENGTH + 1)].astype(np.int32)
    params, state, loss = step(params, state, jax.device_put(tokens, by_example))
    if number % MICRO_BATCHES == 0:
        print(f"step {number // MICRO_BATCHES:2}  loss {loss:.3f}")
