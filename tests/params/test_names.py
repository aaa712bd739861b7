"""One name for one parameter, whatever it is wrapped in."""

from typing import Any

import equinox
from flax import linen, nnx
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_largebatch as lb
from optax_largebatch.params.paths import leaf_names
from tests.params.selection import selected


@jax.tree_util.register_pytree_node_class
class Wrapped:
    """A node without keys, such as Haliax's `NamedArray`; its arrays get indices as keys."""

    def __init__(self, *arrays):
        self.arrays = arrays

    def tree_flatten(self):
        return self.arrays, None

    @classmethod
    def tree_unflatten(cls, _, arrays):
        return cls(*arrays)


class Dense(equinox.Module):
    weight: Any
    bias: Any


class Attention(equinox.Module):
    """With one field, which is called as that of a box of Flax."""

    value: Any


MATRIX, VECTOR = jnp.ones((3, 2)), jnp.ones(2)
NETWORKS = {
    "plain": {"dense": {"weight": MATRIX, "bias": VECTOR}},
    "wrapped": {"dense": {"weight": Wrapped(MATRIX), "bias": Wrapped(VECTOR)}},
    "wrapped twice": {"dense": {"weight": Wrapped(Wrapped(MATRIX)), "bias": Wrapped(VECTOR)}},
    "wrapped in equinox": {"dense": Dense(Wrapped(MATRIX), Wrapped(VECTOR))},
    "linen": {"dense": {"weight": linen.Partitioned(MATRIX, (None, None)), "bias": VECTOR}},
    "wrapped in linen": {
        "dense": {"weight": linen.Partitioned(Wrapped(MATRIX), ()), "bias": VECTOR}
    },
    "nnx": {"dense": {"weight": nnx.Param(MATRIX), "bias": nnx.Param(VECTOR)}},
}


@pytest.mark.parametrize("hidden", [optax.MaskedNode(), None], ids=["masked", "frozen"])
def test_one_name_where_arrays_are_hidden(hidden):
    """What is hidden in a wrapper of one array leaves the wrapper and its index."""
    params = {"dense": {"weight": Wrapped(MATRIX), "bias": Wrapped(hidden)}}
    mask = lb.matching("weight$").mask(params)
    assert leaf_names(params) == ["dense/weight"]
    assert jax.tree.leaves(mask) == [True]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"layers": (MATRIX, VECTOR)}, ["layers/0", "layers/1"]),
        ({"layers": [{"bias": Wrapped(VECTOR)}]}, ["layers/0/bias"]),
        ({"layers": Wrapped(MATRIX, VECTOR)}, ["layers/0", "layers/1"]),
        ({"layer": Attention(MATRIX)}, ["layer/value"]),
        ({"layers": Wrapped(MATRIX, None)}, ["layers/0"]),
        ({"layers": Wrapped([MATRIX])}, ["layers/0/0"]),
        ({"layers": Wrapped(Wrapped(MATRIX), Wrapped(VECTOR))}, ["layers/0", "layers/1"]),
    ],
)
def test_other_indices_stay(params, expected):
    assert leaf_names(params) == expected


def test_a_box_of_several_arrays():
    params = {"layer": nnx.Param([MATRIX, VECTOR])}
    assert leaf_names(params) == ["layer/value/0", "layer/value/1"]
    assert "muon" in str(lb.explain(lb.muon(0.1), params))


@pytest.mark.parametrize("params", NETWORKS.values(), ids=NETWORKS)
def test_one_name(params):
    """A bias is neither decayed nor adapted."""
    mask = ~lb.matching_kinds("bias", "norm")
    optimizer = lb.lamb(0.1, weight_decay=0.5, weight_decay_mask=mask, trust_ratio_mask=mask)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, state = optimizer.update(zeros, optimizer.init(params), params)
    sizes = {leaf.ndim: abs(float(leaf.sum())) for leaf in jax.tree.leaves(updates)}
    assert sizes[1] == 0
    assert sizes[2] > 0
    assert set(lb.trust_ratios(optimizer, state, params)) == {"dense/bias", "dense/weight"}
    explained = {one.name: one.decayed for one in lb.explain(optimizer, params).parameters}
    assert explained == {"dense/bias": False, "dense/weight": True}


def test_kinds_go_by_the_last_named_part():
    params = {
        "bias": [VECTOR, VECTOR],
        "scale": Wrapped(VECTOR, VECTOR),
        "norm": (VECTOR, VECTOR),
        "layers": [(MATRIX, VECTOR)],
        "cls": [MATRIX],
    }

    assert selected(lb.matching_kinds("bias"), params) == {"bias/0", "bias/1"}
    assert selected(lb.matching_kinds("norm"), params) == {
        "scale/0",
        "scale/1",
        "norm/0",
        "norm/1",
    }
    assert selected(lb.matching_kinds("token"), params) == {"cls/0"}


def test_wrapped_stacks():
    stack, stacked = jnp.ones((4, 3, 2)), lb.stacked_layers({"layers/weight$": 0})
    for weight in (Wrapped(stack), linen.Partitioned(stack, ("layers", "in", "out"))):
        params = {"layers": {"weight": weight}, "head": Wrapped(MATRIX)}
        assert stacked.axes(params) == [(), (0,)]


def test_stacks_that_a_function_chooses_by_dtype():
    """What is kept for a tree is not taken for one of other dtypes."""
    stacked = lb.stacked_layers(
        lambda params: jax.tree.map(lambda x: 0 if x.dtype == jnp.bfloat16 else None, params)
    )
    for dtype, expected in (("bfloat16", {(4, 4): 4}), ("float32", {})):
        params = {"cube": jnp.ones((4, 4, 4), dtype), "square": jnp.ones((4, 4))}
        optimizer = lb.muon(0.1, stacked=stacked)
        assert lb.explain(optimizer, params).parameters[0].matrices == expected
