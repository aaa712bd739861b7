"""A small transformer, trained in bfloat16 on the text of Python's standard library."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_largebatch as lb

STEPS, BATCH, LENGTH, WIDTH, HEADS, LAYERS = 300, 16, 64, 64, 4, 2
SYMBOLS = 128

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@pytest.fixture(autouse=True)
def standard_settings():
    """A model in bfloat16 adds float32 updates."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@functools.cache
def text():
    """Modules of the standard library, as ASCII."""
    library = pathlib.Path(functools.__file__).parent
    modules = (library / name for name in ("functools.py", "dataclasses.py", "argparse.py"))
    together = "".join(module.read_text(encoding="utf-8") for module in modules)
    return np.frombuffer(together.encode("ascii", "ignore"), np.uint8).astype("int32")


def batch(rng, size=BATCH):
    starts = rng.integers(0, len(text()) - LENGTH - 1, size)
    return jnp.asarray(np.stack([text()[start : start + LENGTH + 1] for start in starts]))


def initial():
    rng = np.random.default_rng(0)

    def matrix(*shape):
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-2]), "float32")

    layers = [
        {
            "attention": matrix(WIDTH, 3 * WIDTH),
            "project": matrix(WIDTH, WIDTH),
            "expand": matrix(WIDTH, 4 * WIDTH),
            "contract": matrix(4 * WIDTH, WIDTH),
            "scale": jnp.ones((2, WIDTH)),
        }
        for _ in range(LAYERS)
    ]
    embedding, positions = matrix(SYMBOLS, WIDTH), matrix(LENGTH, WIDTH)
    return {"embedding": embedding, "positions": positions, "layers": layers}


def normalized(x, scale):
    wide = x.astype("float32")
    rms = jnp.sqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)
    return (wide / rms).astype(x.dtype) * scale


def loss(params, tokens):
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x = params["embedding"][inputs] + params["positions"]
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    for layer in params["layers"]:
        given = normalized(x, layer["scale"][0]) @ layer["attention"]
        q, k, v = jnp.moveaxis(given.reshape(*x.shape[:2], 3, HEADS, -1), 2, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype("float32") / np.sqrt(WIDTH / HEADS)
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9)).astype(x.dtype)
        x += jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ layer["project"]
        x += jax.nn.gelu(normalized(x, layer["scale"][1]) @ layer["expand"]) @ layer["contract"]
    logits = (x @ params["embedding"].T).astype("float32")
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def final_loss(optimizer, dtype):
    """The loss after the training, on text that is the same for all, computed in float32."""
    params = jax.tree.map(lambda x: x.astype(dtype), initial())
    state = optimizer.init(params)
    rng = np.random.default_rng(1)

    @jax.jit
    def step(params, state, tokens):
        gradients = jax.grad(loss)(params, tokens)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(STEPS):
        params, state = step(params, state, batch(rng))
    wide = jax.tree.map(lambda x: x.astype("float32"), params)
    return float(loss(wide, batch(np.random.default_rng(2), size=64)))


def test_masters_and_stochastic_rounding_keep_the_loss_of_float32():
    """A rate so small that bfloat16 alone loses most steps, as at the end of every training."""
    optimizer = lb.lamb(optax.linear_schedule(2e-3, 0.0, STEPS), weight_decay=0.01)
    full = final_loss(optimizer, "float32")
    masters = final_loss(lb.master_weights(optimizer), "bfloat16")
    stochastic = final_loss(lb.stochastic_rounding(optimizer), "bfloat16")
    without = final_loss(optimizer, "bfloat16")
    print(
        f"float32 {full:.4f}, masters {masters:.4f}, stochastic rounding {stochastic:.4f}, "
        f"bfloat16 alone {without:.4f}"
    )
    assert abs(masters - full) < 0.02 * full
    assert abs(stochastic - full) < 0.02 * full
    assert without - full > 0.05 * full
