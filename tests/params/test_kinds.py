"""Which parameters by what they are."""

import equinox
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_largebatch as lb
from optax_largebatch.params.rules import KINDS

PARAMS = {
    "BatchNorm_0": {"scale": jnp.ones(3), "offset": jnp.ones(3)},
    "bn_init": {"weight": jnp.ones((1, 3))},
    "dense": {"bias": jnp.ones((2, 3)), "kernel": jnp.ones((3, 3)), "gain": jnp.ones(3)},
    "normalizer_free": jnp.ones((2, 2)),
    "final_rmsnorm": jnp.ones(3),
    "blocks": {
        "ln1": jnp.ones(3),
        "ln_f": jnp.ones(3),
        "q_norm_scale": jnp.ones(3),
        "attn_ln": jnp.ones(3),
        "gn1": jnp.ones(3),
        "gamma_1": jnp.ones(3),
    },
    "final_ln": {"weight": jnp.ones(3)},
    "linear": {"b": jnp.ones(2), "w": jnp.ones((2, 2))},
    "temperature": jnp.ones(()),
    "posembed_input": {"pos_embedding": jnp.ones((1, 4, 2))},
    "cls": jnp.ones((1, 1, 2)),
    "classes": jnp.ones((4, 2)),
}
BARE_NORMS = {
    "final_rmsnorm",
    "blocks/ln1",
    "blocks/ln_f",
    "blocks/q_norm_scale",
    "blocks/attn_ln",
    "blocks/gn1",
    "blocks/gamma_1",
    "final_ln/weight",
}
OF = {
    "bias": {"dense/bias", "linear/b"},
    "norm": {"BatchNorm_0/scale", "BatchNorm_0/offset", "bn_init/weight", *BARE_NORMS},
    "vector": {"BatchNorm_0/scale", "BatchNorm_0/offset", "dense/gain", "linear/b", *BARE_NORMS},
    "scalar": {"temperature"},
    "position": {"posembed_input/pos_embedding"},
    "token": {"cls"},
}


def selected(rule, params):
    leaves = jax.tree_util.tree_leaves_with_path(rule.mask(params))
    return {
        jax.tree_util.keystr(path, simple=True, separator="/") for path, chosen in leaves if chosen
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


def test_norms_of_equinox():
    layers = [equinox.nn.Linear(2, 2, key=jax.random.key(0)), equinox.nn.LayerNorm(2)]
    params = equinox.filter({"linear": layers[0], "norm1": layers[1]}, equinox.is_array)
    assert selected(lb.matching_kinds("norm"), params) == {"norm1/weight", "norm1/bias"}


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
