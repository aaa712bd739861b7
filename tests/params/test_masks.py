"""One mask in all the forms that users write it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_largebatch as lb
from optax_largebatch.params.masks import resolve_mask

PARAMS = {"dense": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}, "scale": jnp.ones(2)}

FORMS = {
    "rule": lb.excluding("bias", "scale"),
    "function": lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
    "function giving a prefix": lambda params: {
        "dense": {"kernel": True, "bias": False},
        "scale": False,
    },
    "tree": {"dense": {"kernel": True, "bias": False}, "scale": False},
    "tree of numpy booleans": {
        "dense": {"kernel": np.True_, "bias": np.False_},
        "scale": np.False_,
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    assert resolve_mask("mask", FORMS[form], PARAMS) == [False, True, False]


def test_prefix_and_none():
    assert resolve_mask("mask", {"dense": True, "scale": False}, PARAMS) == [True, True, False]
    assert resolve_mask("mask", None, PARAMS) == [True] * 3


@pytest.mark.parametrize("form", FORMS)
def test_decays_what_optax_decays(form):
    ours = lb.add_decayed_weights(0.5, FORMS[form])
    theirs = optax.add_decayed_weights(0.5, FORMS["function"])
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    updates, _ = ours.update(zeros, ours.init(PARAMS), PARAMS)
    expected, _ = theirs.update(zeros, theirs.init(PARAMS), PARAMS)
    jax.tree.map(np.testing.assert_array_equal, updates, expected)
