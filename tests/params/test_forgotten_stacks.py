"""Stacks of layers that nobody has declared are never silent; the message says what to write."""

import re
import warnings

from flax import linen, nnx
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_largebatch as lb
from tests.optimizers.registry import OPTIMIZERS

PARAMS = {
    "embed": jnp.ones((8, 4)),
    "layers": {
        "dense": {"kernel": jnp.ones((3, 4, 4)), "bias": jnp.zeros((3, 4))},
        "norm": {"scale": jnp.ones((3, 4))},
    },
}
SAYS = (
    r"3 of 4 parameters look like stacks of layers, such as .* stacked=None does not declare them"
)


def forgotten(optimizer):
    """What `init` expects of a forgotten stack: an error, or a warning."""
    if optimizer is lb.muonh:
        return pytest.raises(ValueError, match=SAYS)
    return pytest.warns(UserWarning, match=SAYS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_says_it(name):
    entry = OPTIMIZERS[name]
    with forgotten(entry.factory):
        entry.make().init(PARAMS)
    for said in ({"layers/": 0}, {}, {"layers/": None}, lb.stacked_layers(lambda params: None)):
        is_muon = entry.known(matrix_axes={} if said == {"layers/": 0} else {"kernel": None})
        entry.make(stacked=said, **is_muon).init(PARAMS)


@pytest.mark.parametrize("optimizer", [lb.muon, lb.muonh, lb.adamh])
def test_beside_an_optimizer_of_optax(optimizer):
    with forgotten(optimizer):
        optimizer(0.1, others=optax.adamw(0.1)).init(PARAMS)


def test_links_by_themselves():
    for link in (lb.scale_by_trust_ratio(), lb.hyperball(0.1), lb.normalize_by_block_norm()):
        with pytest.warns(UserWarning, match=SAYS):
            optax.chain(link).init(PARAMS)


def test_the_line_of_the_message_is_all_that_is_missing():
    with pytest.raises(ValueError, match=SAYS) as error:
        lb.muonh(0.1).init(PARAMS)
    line = re.search(r"stacked=(stacked_layers\(.*?\))", str(error.value)).group(1)
    lb.muonh(0.1, stacked=eval(line, vars(lb))).init(PARAMS)


def test_a_stack_that_the_patterns_leave_out():
    part = {"layers/dense": 0}
    with pytest.warns(
        UserWarning, match=r"1 of 4 .* 'layers/norm/scale' .*'\^layers/norm/scale\$'"
    ):
        lb.muonh(0.1, stacked=part).init(PARAMS)
    lb.muonh(0.1, stacked=part | {"norm/scale": None}).init(PARAMS)


def test_what_is_no_stack():
    """Modules of kernels and biases, convolutions, heads, and a root of few parameters."""
    params = {
        "conv": {"kernel": jnp.ones((3, 3, 4, 8)), "bias": jnp.ones(8)},
        "query": {"kernel": jnp.ones((4, 2, 8)), "bias": jnp.ones((2, 8))},
        "kernel": jnp.ones((4, 4)),
    }
    for name, entry in OPTIMIZERS.items():
        if name not in ("lbsgd", "larc"):
            entry.make(**entry.known(matrix_axes={"query/kernel": None})).init(params)
    lb.muonh(0.1, stacked={"layers": 0}).init({"layers": jnp.ones((8, 3, 2)), "bias": jnp.ones(8)})


def test_layers_on_the_second_axis():
    """As in MaxText, with experts in the stack, which the router has an output for."""
    layer = {
        "norm": {"scale": jnp.ones((8, 3))},
        "query": {"kernel": jnp.ones((8, 3, 2, 4))},
        "moe": {
            "gate": {"kernel": jnp.ones((8, 3, 5))},
            "wi": jnp.ones((5, 3, 8, 16)),
            "wo": jnp.ones((5, 3, 16, 8)),
        },
    }
    params = {"embed": jnp.ones((30, 8)), "decoder": {"layers": layer}}
    with pytest.raises(ValueError, match="5 of 6 parameters look like stacks") as error:
        lb.muonh(0.1).init(params)
    said = re.search(r"stacked=stacked_layers\(({.*?})\)", str(error.value)).group(1)
    assert eval(said) == {"decoder/layers/": 1, "(^|/)(wi|wo)$": 0}
    assert lb.stacked_layers(eval(said)).sizes(params) == [3, 15, 15, 3, 3, 1]
    for optimizer in (lb.lamb, lb.muon, lb.adamh):
        with pytest.warns(UserWarning, match="'decoder/layers/': 1"):
            optimizer(0.1).init(params)


def test_kernels_alone_in_what_gpt_2_calls_h():
    params = {
        "h": {"up": jnp.ones((3, 4, 8)), "down": jnp.ones((3, 8, 4))},
        "wte": jnp.ones((9, 4)),
    }
    with pytest.raises(ValueError, match=r"{'h/': 0}"):
        lb.muonh(0.1).init(params)


class Block(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        return linen.Dense(4)(linen.LayerNorm()(x)), None


class Scanned(linen.Module):
    @linen.compact
    def __call__(self, x):
        settings = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3}
        x, _ = linen.scan(Block, **settings)(name="blocks")(x, None)
        return linen.Dense(2)(x)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.dense = nnx.LayerNorm(4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)


class Vmapped(nnx.Module):
    def __init__(self, rngs):
        self.head = nnx.Linear(4, 2, rngs=rngs)
        make = nnx.split_rngs(splits=3)(nnx.vmap(Layer, in_axes=0, out_axes=0))
        self.blocks = make(rngs)


@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="Flax's scan wants jax 0.8")
@pytest.mark.parametrize(
    "params",
    [
        lambda: Scanned().init(jax.random.key(0), jnp.ones((2, 4)))["params"],
        lambda: nnx.state(Vmapped(nnx.Rngs(0)), nnx.Param),
    ],
    ids=["linen.scan", "nnx.vmap"],
)
def test_layers_that_flax_stacks(params):
    params = params()
    with pytest.raises(ValueError, match=r"stacked_layers\({'blocks/': 0}\)"):
        lb.muonh(0.1).init(params)
    lb.muonh(0.1, stacked={"blocks/": 0}).init(params)


def test_under_eval_shape_and_jit():
    for traced in (jax.eval_shape, lambda init, params: jax.jit(init)(params)):
        with pytest.warns(UserWarning, match=SAYS):
            traced(lb.muon(0.1).init, PARAMS)


def test_one_sentence_for_all_links():
    """Python prints a warning once; LANS has three links that go by layers."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lb.lans(0.1).init(PARAMS)
    assert len({str(one.message) for one in caught}) == 1
