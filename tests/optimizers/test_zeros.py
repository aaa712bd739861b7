"""Matrices that start at zero train: adapters, output projections, biases of heads."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_largebatch as lb

WIDTH, WORDS = 16, 24

pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.skipif(
        not hasattr(nnx, "List"), reason="nnx.Optimizer takes no masks of optax before Flax 0.12"
    ),
    pytest.mark.filterwarnings("ignore:.*may be matrices"),
]


class Adapted(nnx.Module):
    """Layers whose kernels are frozen, each with an adapter of rank 2."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.LoRALinear(16, 16, lora_rank=2, rngs=rngs) for _ in range(3)])

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.gelu(layer(x))
        return x


class NanochatLike(nnx.Module):
    """No biases and no scales; the projections back to the residual stream start at zero."""

    def __init__(self, rngs):
        plain = {"use_bias": False, "rngs": rngs}
        none = {"kernel_init": nnx.initializers.zeros, **plain}
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.mixing = nnx.Linear(WIDTH, WIDTH, **plain)
        self.mixing_out = nnx.Linear(WIDTH, WIDTH, **none)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, **plain)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, **none)
        self.lm_head = nnx.Linear(WIDTH, WORDS, **plain)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.mixing_out(jnp.cumsum(self.mixing(x), 1))
        return self.lm_head(x + self.down(nnx.relu(self.up(x)) ** 2))


class WithAttention(nnx.Module):
    """Biases of queries, keys and values have an axis of heads, and start at zero."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.mlp = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, WORDS, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(x, is_causal=True)
        return self.head(x + self.mlp(x))


TOKENS = jax.random.randint(jax.random.key(0), (8, 9), 0, WORDS)
NUMBERS = jax.random.normal(jax.random.key(1), (32, 16))


def of_tokens(model):
    return optax.softmax_cross_entropy_with_integer_labels(
        model(TOKENS[:, :-1]), TOKENS[:, 1:]
    ).mean()


NETWORKS = {
    "adapters": (Adapted, lambda model: jnp.mean((model(NUMBERS) - jnp.sin(NUMBERS)) ** 2)),
    "zero projections": (NanochatLike, of_tokens),
    "biases of heads": (WithAttention, of_tokens),
}


def planned(params):
    run = lb.TunedRun("muonh", batch_size=16, total=1280, learning_rate=0.02)
    return lb.planned_optimizer(lb.batch_plan(64, total=1920, run=run), params)


OPTIMIZERS = {
    "muonh": lambda params: lb.muonh(0.02),
    "adamh": lambda params: lb.adamh(0.02),
    "planned_optimizer": planned,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("network", NETWORKS)
def test_all_of_a_network_moves(network, name):
    """The keys' bias has no gradient but rounding: a softmax does not see it."""
    make, loss_of = NETWORKS[network]
    model = make(nnx.Rngs(0))
    kind = nnx.LoRAParam if network == "adapters" else nnx.Param
    params = nnx.as_pure(nnx.state(model, kind))
    optimizer = nnx.Optimizer(model, OPTIMIZERS[name](params), wrt=kind)
    before = jax.tree.map(np.asarray, params)

    @nnx.jit
    def step(model, optimizer):
        loss, gradients = nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, kind))(model)
        optimizer.update(model, gradients)
        return loss

    losses = [step(model, optimizer) for _ in range(10)]
    after = nnx.as_pure(nnx.state(model, kind))
    moved = jax.tree.map(lambda old, new: not np.array_equal(old, new), before, after)
    still = [path for path, flag in jax.tree_util.tree_leaves_with_path(moved) if not flag]
    assert not still
    assert losses[-1] < losses[0]
