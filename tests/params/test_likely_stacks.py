"""Which parameters look like stacks of layers that nobody declared."""

import pytest

import optax_largebatch as lb
from optax_largebatch.params.likely_stacks import likely_stacks
from tests.params.selection import shapes


def found(tree, stacked=None):
    """The names of likely stacks, each with its axis and the entry that declares it."""
    params = shapes(tree)
    axes = (stacked or lb.stacked_layers(lambda params: None)).axes(params)
    return {
        one.name: (one.axis, one.shape[one.axis], one.entry) for one in likely_stacks(params, axes)
    }


DENSE = {"bias": (8,), "kernel": (8, 8)}
LAYER = {"dense": {"bias": (4, 8), "kernel": (4, 8, 8)}, "norm": {"scale": (4, 8)}}

STACKS = {
    "a scanned layer": (
        {"encoder": {"layers": LAYER}, "head": DENSE},
        "encoder/layers/",
        ["dense/bias", "dense/kernel", "norm/scale"],
    ),
    "whatever it is called": ({"h": LAYER, "head": DENSE}, "h/", ["dense/bias", "dense/kernel"]),
    "a kernel alone, by the name": ({"layers": {"kernel": (4, 8, 8)}}, "layers/", ["kernel"]),
    "kernels alone in what GPT-2 calls h": (
        {"h": {"up": (4, 8, 16), "down": (4, 16, 8)}, "wte": (9, 8)},
        "h/",
        ["up", "down"],
    ),
    "by the name of linen": (
        {"ScanBlock_0": {"up": {"kernel": (4, 8, 16)}, "down": {"kernel": (4, 16, 8)}}},
        "ScanBlock_0/",
        ["up/kernel", "down/kernel"],
    ),
    "experts": ({"experts": {"up": (4, 8, 9), "down": (4, 9, 8)}, "head": DENSE}, "experts/", []),
}


@pytest.mark.parametrize("name", STACKS)
def test_stacks(name):
    tree, module, names = STACKS[name]
    own = found(tree)
    assert own
    assert set(own) >= {f"{module}{name}" for name in names}
    assert {entry for *_, entry in own.values()} == {f"{module!r}: 0"}
    assert all(name.startswith(module) for name in own)
    declared = lb.stacked_layers({module: 0})
    assert not found(tree, declared)
    assert declared.sizes(shapes(tree)).count(4) == len(own)


NO_STACKS = {
    "dense layers": {"a": DENSE, "b": DENSE},
    "layers in a list": {"layers": [DENSE, DENSE]},
    "kernels in a list": {"layers": [(8, 8)] * 2},
    "convolutions": {"conv": {"bias": (8,), "kernel": (3, 3, 4, 8)}},
    "convolutions without biases": {"block": {"a": (3, 3, 4, 8), "b": (3, 3, 8, 8)}},
    "convolutions in layers": {"layers": {"conv_0": (3, 3, 4, 8), "conv_1": (3, 3, 8, 8)}},
    "an embedding": {"embed": {"embedding": (100, 8)}, "head": DENSE},
    "attention": {
        "attention": {
            **{name: {"bias": (4, 2), "kernel": (8, 4, 2)} for name in ("key", "query", "value")},
            "out": {"bias": (8,), "kernel": (4, 2, 8)},
        }
    },
    "as many heads as channels in each": {
        "attention": {
            **{name: {"bias": (4, 4), "kernel": (16, 4, 4)} for name in ("key", "query", "value")},
            "out": {"kernel": (4, 4, 16)},
        }
    },
    "as many heads as inputs": {"query": {"bias": (8, 4), "kernel": (8, 8, 4)}, "norm": (8,)},
    "a dense layer and a convolution in a list": {"layers": [(8, 8), (8, 3, 8)], "norm": (8,)},
    "biases and scales alone": {"norm": {"bias": (8, 4), "scale": (8, 4, 2)}, "kernel": (4,)},
    "one layer": {"layers": {"bias": (1, 8), "kernel": (1, 8, 8)}},
    "a single array": (4, 8, 8),
    "a root of few parameters": {"query": {"bias": (2, 8), "kernel": (4, 2, 8)}, "kernel": (4, 4)},
}


@pytest.mark.parametrize("name", NO_STACKS)
def test_no_stacks(name):
    assert found(NO_STACKS[name]) == {}


@pytest.mark.parametrize("axis", [0, 1])
def test_a_parameter_beside_a_declared_stack(axis):
    tree = {
        "layers": {"bias": [(4, 8), (8, 4)][axis], "kernel": [(4, 8, 16), (8, 4, 16)][axis]},
        "head": DENSE,
    }
    own = found(tree, lb.stacked_layers({"layers/kernel": axis}))
    assert own == {"layers/bias": (axis, 4, f"'^layers/bias$': {axis}")}


def test_parameters_of_other_lengths_beside_a_declared_stack():
    tree = {"experts": {"kernel": (4, 8, 8)}, "router": (8, 4), "scale": (8,)}
    assert found(tree, lb.stacked_layers({"experts/": 0})) == {}
