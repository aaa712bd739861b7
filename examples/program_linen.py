"""From AdamW to MuonH in Flax linen: FSDP, scanned layers, a batch that grows.

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
LAYERS, WIDTH, HEADS, LENGTH, BATCH = 4, 64, 4, 32, 16
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

# AdamW works at batch 16; MuonH takes it to 64. Yours may be 512 and 16,384.
run = lb.TunedRun(
    "adamw",
    batch_size=16,
    total=1280,
    learning_rate=lb.PlannedRate(4e-3, warmup=64, decay="linear"),
    weight_decay=0.4,
)
batches = "0:16 256:64"  # 64 from example 256 on
# A large batch needs more examples: 1.5 times as many, until you have measured it.
plan = lb.batch_plan(batches, total=1920, run=run.to("muonh"), micro_batch_size=16)
print(plan)
optimizer = lb.planned_optimizer(
    plan,
    params,
    stacked={"layers/": 0},
    matrix_axes={"qkv/kernel": f"layers rows ({3 * HEADS} columns)"},
)
print(lb.explain(optimizer, params))
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
for call in range(plan.calls):
    starts = rng.integers(len(text) - LENGTH, size=(BATCH, 1))
    tokens = text[starts + np.arange(LENGTH + 1)].astype(np.int32)
    params, state, loss = step(params, state, jax.device_put(tokens, by_example))
    if plan.step_of_call(call + 1) > plan.step_of_call(call):
        print(f"step {plan.step_of_call(call):2}  loss {loss:.3f}")
