"""A transformer in Flax linen and MuonH: FSDP, scanned layers and accumulation.

    python examples/program_linen.py

It trains on the source of Python's standard library, on all devices that there are.
"""

import os
from pathlib import Path

import flax.linen as nn
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


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        x = jax.lax.with_sharding_constraint(x, by_example)
        hidden = nn.LayerNorm(name="attention_norm")(x)
        qkv = nn.Dense(3 * WIDTH, name="qkv")(hidden)
        qkv = qkv.reshape(*x.shape[:2], HEADS, -1)
        mixed = jax.nn.dot_product_attention(*jnp.split(qkv, 3, -1), is_causal=True)
        x += nn.Dense(WIDTH, name="out")(mixed.reshape(x.shape))
        hidden = nn.Dense(4 * WIDTH, name="up")(nn.LayerNorm(name="mlp_norm")(x))
        return x + nn.Dense(WIDTH, name="down")(nn.gelu(hidden)), None


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        layers = nn.scan(
            Layer,
            length=LAYERS,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            check_constancy_invariants=False,  # traces the layer once, not twice
        )(name="layers")
        x, _ = layers(nn.Embed(256, WIDTH, name="embed")(tokens), None)
        x = nn.LayerNorm(name="norm")(x)
        return nn.Dense(256, use_bias=False, name="head")(x)


def split_last_axis(x):
    return NamedSharding(mesh, P(*[None] * (x.ndim - 1), "fsdp"))


def make():
    example = jnp.zeros((BATCH, LENGTH), jnp.int32)
    return Transformer().init(jax.random.key(0), example)["params"]


# Shapes come first, so that no device ever holds the whole model.
shardings = jax.tree.map(split_last_axis, jax.eval_shape(make))
params = jax.jit(make, out_shardings=shardings)()

rate = lb.warmup_decay(0.02, total_steps=STEPS, warmup_steps=3)
optimizer = lb.muonh(
    rate,
    matrix_mask=~lb.matching("embed"),
    adamh_mask=lb.matching("head"),
    matrix_axes={"qkv/kernel": f"layers rows ({3 * HEADS} columns)"},
    stacked={"layers/": 0},
)
optimizer = lb.accumulate_gradients(optimizer, every=MICRO_BATCHES)
optimizer = lb.with_partition_specs(optimizer, shardings)
state_shardings = lb.optimizer_state_shardings(optimizer, params, mesh)
state = jax.jit(optimizer.init, out_shardings=state_shardings)(params)


def loss_of(params, tokens):
    logits = Transformer().apply({"params": params}, tokens[:, :-1])
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
