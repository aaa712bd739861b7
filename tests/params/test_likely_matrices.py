"""What Muon would leave to another optimizer, or turn round, is said with a line to paste."""

import ast
import re
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_largebatch as lb

KERNEL = {"kernel": jnp.ones((8, 16)), "bias": jnp.ones(16)}


TO_HEADS = {"kernel": jnp.ones((8, 2, 3)), "bias": jnp.zeros((2, 3))}
FROM_HEADS = {"kernel": jnp.ones((2, 3, 8)), "bias": jnp.zeros(8)}
QWEN = dict.fromkeys(("q_proj", "k_proj", "v_proj"), TO_HEADS) | {"o_proj": FROM_HEADS}


def convolutions(*shapes):
    return {f"Conv_{number}": {"kernel": jnp.ones(shape)} for number, shape in enumerate(shapes)}


def line(message):
    """The argument in a message."""
    return ast.literal_eval(re.search(r"matrix_axes=({.*?})\.", str(message)).group(1))


KERNELS = {
    "attention": (
        {"attention": QWEN, "mlp": KERNEL},
        {
            "(^|/)(k_proj|q_proj|v_proj)/kernel$": (0, (1, 2)),
            "(^|/)o_proj/kernel$": ((0, 1), 2),
        },
    ),
    "layers of attention": (
        {"layers": jax.tree.map(lambda x: jnp.stack([x] * 5), {"a": QWEN, "mlp": KERNEL})},
        {
            "(^|/)(k_proj|q_proj|v_proj)/kernel$": (1, (2, 3)),
            "(^|/)o_proj/kernel$": ((1, 2), 3),
        },
    ),
    "convolutions": (
        convolutions((3, 3, 3, 8), (3, 3, 8, 8), (1, 1, 8, 16)) | {"Dense": KERNEL},
        {"^Conv_1/kernel$": ((0, 1, 2), 3), "^Conv_2/kernel$": ((0, 1, 2), 3)},
    ),
    "einsums of as many heads in as many groups": (
        {"q_einsum": {"w": jnp.ones((2, 2, 8, 3))}, "scale": jnp.ones(8), "mlp": KERNEL},
        {"(^|/)w$": (2, 3)},
    ),
    "outputs first": (
        {"q_proj": {"weight": jnp.ones((2, 3, 8))}, "norm": jnp.ones(8), "mlp": KERNEL},
        {"(^|/)weight$": (2, (0, 1))},
    ),
}


@pytest.mark.parametrize("make", [lb.muon, lb.muonh])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_with_more_axes(name, make):
    params, expected = KERNELS[name]
    stacked = {"layers/": 0} if "layers" in params else {}
    with pytest.warns(UserWarning, match="have more than two axes and may be matrices") as caught:
        make(0.1, stacked=stacked).init(params)
    assert line(caught[0].message) == expected
    optimizer = make(0.1, stacked=stacked, matrix_axes=expected)
    optimizer.init(params)  # pasted, it is silent
    moved = {x.name for x in lb.explain(optimizer, params).parameters if x.matrices}
    assert {name for name in moved if re.search("|".join(expected), name)}
    assert not any(name.endswith("bias") for name in moved)
    make(0.1, stacked=stacked, matrix_axes=dict.fromkeys(expected)).init(params)


def test_the_line_keeps_what_is_said_already():
    said = {"mlp/kernel": (0, 1)}
    with pytest.warns(UserWarning, match="more than two axes") as caught:
        lb.muonh(0.1, matrix_axes=said).init({"attention": QWEN, "mlp": KERNEL})
    assert line(caught[0].message) == said | KERNELS["attention"][1]


SILENT = {
    "a first layer": convolutions((4, 4, 3, 8)),
    "the only convolution": convolutions((4, 4, 8, 16)),
    "depthwise": convolutions((3, 3, 1, 8), (7, 7, 1, 16), (4, 1, 8)),
    "positions": {"pos_embedding": jnp.ones((1, 9, 8)), "cls": jnp.ones((1, 1, 8))},
    "norms of Haiku": {"batchnorm": {"scale": jnp.ones((1, 1, 1, 8))}},
    "complex numbers as pairs": {"B": jnp.ones((4, 8, 2)), "C": jnp.ones((8, 4, 2))},
}


@pytest.mark.parametrize("name", SILENT)
def test_what_is_no_matrix_needs_no_word(name):
    params = SILENT[name] | {"mlp": KERNEL}
    optimizer = lb.muonh(0.1)
    optimizer.init(params)
    moved = [x.name for x in lb.explain(optimizer, params).parameters if x.matrices]
    assert moved == ["mlp/kernel"]


@pytest.mark.parametrize("output", ["out", "attention_output"])
def test_attention_is_known_by_its_names(output):
    """That of Flax, Keras and MaxText: one matrix of all heads, and biases that are none."""
    params = dict.fromkeys(("query", "key", "value"), TO_HEADS) | {output: FROM_HEADS}
    stacks = jax.tree.map(lambda x: jnp.stack([x] * 5, 1), params)
    for number, own, stacked in ((1, params, None), (5, stacks, {"attention": 1})):
        optimizer = lb.muonh(0.1, stacked=stacked)
        optimizer.init({"attention": own})
        for x in lb.explain(optimizer, {"attention": own}).parameters:
            _, name, kind = x.name.split("/")
            sides = (6, 8) if name == output else (8, 6)
            assert x.matrices == ({sides: number} if kind == "kernel" else {})


@pytest.mark.parametrize(
    "name", ["rel_embedding", "relative_attention_bias/embedding", "A_log", "time_decay", "bias"]
)
def test_vectors_of_two_axes(name):
    """Biases of heads, tables of biases and states are no matrices, unless one says so."""
    outer, _, inner = name.rpartition("/")
    vector = {inner: jnp.ones((4, 6))}
    params = {"mixer": {outer: vector} if outer else vector, "mlp": KERNEL}
    for optimizer in (lb.muon(0.1), lb.muonh(0.1), lb.adamh(0.1)):
        facts = {x.name: x for x in lb.explain(optimizer, params).parameters}
        assert facts[f"mixer/{name}"].direction == "adam"
        assert facts[f"mixer/{name}"].length == ""
    said = lb.muon(0.1, matrix_axes={f"{inner}$": (0, 1)})
    if inner != "bias":
        assert lb.explain(said, params).parameters[0].matrices == {(4, 6): 1}


@pytest.mark.parametrize("make", [lb.muon, lb.muonh])
def test_no_matrix_at_all_is_an_error(make):
    params = {"a": KERNEL, "b": KERNEL}
    for optimizer in (optax.flatten(make(0.1)), make(0.1, matrix_mask=lb.matching("bias"))):
        with pytest.raises(ValueError, match=r"moves matrices, and none of the .* parameters is"):
            optimizer.init(params)
    optax.masked(make(0.1), {"a": KERNEL | {"kernel": True, "bias": False}, "b": False})


def test_weights_that_are_outputs_first():
    """A bias as long as the first axis tells it; the square one is alike."""
    params = [
        {"weight": jnp.ones((16, 8)), "bias": jnp.ones(16)},
        {"weight": jnp.ones((16, 16)), "bias": jnp.ones(16)},
    ]
    with pytest.warns(UserWarning, match="seem to have their outputs first") as caught:
        lb.muon(0.1).init(params)
    assert line(caught[0].message) == {"(^|/)weight$": (1, 0)}
    for said in ((1, 0), (0, 1)):
        lb.muon(0.1, matrix_axes={"weight$": said}).init(params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lb.muonh(0.1).init(params)  # to which turned matrices are alike
        lb.muon(0.1, consistent_rms=0.2).init(params)
        lb.muon(0.1).init(params[1:])
        lb.muon(0.1).init([KERNEL])
