"""Which parameters by what they are."""

import jax.numpy as jnp
import optax
import pytest

import optax_largebatch as lb
from optax_largebatch.params.rules import KINDS
from tests.params.selection import selected, shapes

BARE_NORMS = {
    "final_rmsnorm",
    "blocks/ln1",
    "blocks/ln_f",
    "blocks/q_norm_scale",
    "blocks/attn_ln",
    "blocks/gn1",
    "blocks/gamma_1",
    "final_ln/weight",
    "norm1/weight",
}
PARAMS = shapes(
    {
        "BatchNorm_0": {"scale": (3,), "offset": (3,)},
        "bn_init": {"weight": (1, 3)},
        "dense": {"bias": (2, 3), "kernel": (3, 3), "gain": (3,)},
        "normalizer_free": (2, 2),
        "linear": {"b": (2,), "w": (2, 2)},
        "temperature": (),
        "posembed_input": {"pos_embedding": (1, 4, 2)},
        "cls": (1, 1, 2),
        "classes": (4, 2),
    }
    | dict.fromkeys(BARE_NORMS, (3,))
)
OF = {
    "bias": {"dense/bias", "linear/b"},
    "norm": {"BatchNorm_0/scale", "BatchNorm_0/offset", "bn_init/weight", *BARE_NORMS},
    "vector": {"BatchNorm_0/scale", "BatchNorm_0/offset", "dense/gain", "linear/b", *BARE_NORMS},
    "scalar": {"temperature"},
    "position": {"posembed_input/pos_embedding"},
    "token": {"cls"},
}


def test_every_kind_is_tested():
    assert set(OF) == set(KINDS)


@pytest.mark.parametrize("kind", OF)
def test_kinds(kind):
    everything = selected(lb.at_least_ndim(0), PARAMS)
    assert selected(lb.matching_kinds(kind), PARAMS) == OF[kind]
    assert selected(~lb.matching_kinds(kind), PARAMS) == everything - OF[kind]


def test_several_kinds():
    assert selected(lb.matching_kinds("bias", "norm"), PARAMS) == OF["bias"] | OF["norm"]
    assert repr(~lb.matching_kinds("bias", "norm")) == "~matching_kinds('bias', 'norm')"


def test_nothing_of_a_kind_is_an_error():
    matrices = {"kernel": jnp.ones((2, 2))}
    for rule in (lb.matching_kinds("bias", "token"), ~lb.matching_kinds("bias", "token")):
        with pytest.raises(ValueError, match=r"no parameter is of the kinds bias, token.*kernel"):
            rule.mask(matrices)


def test_unknown_kinds():
    for kinds in ((), ("biases",)):
        with pytest.raises(ValueError, match=r"matching_kinds\(\) needs one or more of 'bias'"):
            lb.matching_kinds(*kinds)


def test_leaves_that_are_hidden_or_stood_in_for():
    """`optax.masked` hides leaves, and `optax.tree.map_params` puts others in their place."""
    optimizer = optax.masked(
        lb.lamb(0.1, weight_decay=0.1, weight_decay_mask=~lb.matching_kinds("vector")),
        {"kernel": True, "bias": False},
    )
    params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    state = optimizer.init(params)
    optax.tree.map_params(optimizer, lambda leaf: leaf, state)
