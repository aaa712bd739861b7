"""From AdamW to MuonH in Keras 3 on JAX: a batch that grows, in a loop of your own.

    python examples/program_keras.py

It trains on the source of Python's standard library.
"""

import os
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

import jax
import keras
from keras import layers
import numpy as np
import optax

import optax_largebatch as lb

LAYERS, HEADS, SIZE, LENGTH, BATCH = 2, 4, 16, 32, 16
WIDTH = HEADS * SIZE
keras.utils.set_random_seed(0)


def transformer():
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(256, WIDTH, name="embed")(tokens)
    for k in range(LAYERS):
        hidden = layers.LayerNormalization(name=f"attention_norm_{k}")(x)
        attention = layers.MultiHeadAttention(HEADS, SIZE, name=f"attention_{k}")
        x += attention(hidden, hidden, use_causal_mask=True)
        hidden = layers.LayerNormalization(name=f"mlp_norm_{k}")(x)
        hidden = layers.Dense(4 * WIDTH, "gelu", name=f"up_{k}")(hidden)
        x += layers.Dropout(0.1)(layers.Dense(WIDTH, name=f"down_{k}")(hidden))
    x = layers.LayerNormalization(name="norm")(x)
    return keras.Model(tokens, layers.Dense(256, use_bias=False, name="head")(x))


model = transformer()
params = {v.path: v.value for v in model.trainable_variables}
rest = [v.value for v in model.non_trainable_variables]  # of Dropout, BatchNorm

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
    matrix_axes={  # each head is a matrix
        "(query|key|value)/kernel": "rows heads columns",
        "attention_output/kernel": "heads rows columns",
    },
)
print(lb.explain(optimizer, params))
state = jax.jit(optimizer.init)(params)


def loss_of(params, rest, tokens):
    values = [params[v.path] for v in model.trainable_variables]
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    logits, rest = model.stateless_call(values, rest, inputs, training=True)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), rest


def step(params, rest, state, tokens):
    loss_and_grads = jax.value_and_grad(loss_of, has_aux=True)
    (loss, rest), grads = loss_and_grads(params, rest, tokens)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), rest, state, loss


step = jax.jit(step, donate_argnums=(0, 1, 2))

files = sorted(Path(os.__file__).parent.glob("*.py"))
text = np.frombuffer(b"".join(map(Path.read_bytes, files)), np.uint8)
rng = np.random.default_rng(0)
for call in range(plan.calls):
    starts = rng.integers(len(text) - LENGTH, size=(BATCH, 1))
    tokens = text[starts + np.arange(LENGTH + 1)].astype(np.int32)
    params, rest, state, loss = step(params, rest, state, tokens)
    if plan.step_of_call(call + 1) > plan.step_of_call(call):
        print(f"step {plan.step_of_call(call):2}  loss {loss:.3f}")

# The model still has the arrays of the start, which the first step has used up.
for variable in model.trainable_variables:
    variable.assign(params[variable.path])
for variable, value in zip(model.non_trainable_variables, rest, strict=True):
    variable.assign(value)
