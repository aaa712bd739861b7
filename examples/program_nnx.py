"""From AdamW to MuonH in Flax nnx: FSDP, scanned layers, a batch that grows.

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
LAYERS, WIDTH, HEADS, LENGTH, BATCH = 4, 64, 4, 32, 16
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


def make():
    model = Transformer(nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    muonh = lb.planned_optimizer(
        plan,
        params,
        stacked={"layers/": 0},
        matrix_axes={"qkv/kernel": f"layers rows ({3 * HEADS} columns)"},
    )
    muonh = lb.with_partition_specs(muonh, nnx.get_named_sharding(params, mesh))
    return model, nnx.Optimizer(model, muonh, wrt=nnx.Param)


# Shapes come first, so that no device ever holds the whole model.
jax.set_mesh(mesh)
graph, shapes = nnx.split(nnx.eval_shape(make))
shardings = nnx.get_named_sharding(shapes, mesh)
start = jax.jit(lambda: nnx.state(make()), out_shardings=shardings)()
model, optimizer = nnx.merge(graph, start)
print(lb.explain(optimizer.tx, nnx.state(model, nnx.Param)))


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
for call in range(plan.calls):
    starts = rng.integers(len(text) - LENGTH, size=(BATCH, 1))
    tokens = text[starts + np.arange(LENGTH + 1)].astype(np.int32)
    loss = step(model, optimizer, jax.device_put(tokens, by_example))
    if plan.step_of_call(call + 1) > plan.step_of_call(call):
        print(f"step {plan.step_of_call(call):2}  loss {loss:.3f}")
