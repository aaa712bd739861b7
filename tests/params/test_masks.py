"""One mask in all the forms that users write it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_largebatch as lb
from optax_largebatch.params.masks import resolve_mask, select_leaves

PARAMS = {"dense": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}, "scale": jnp.ones(2)}

FORMS = {
    "rule": ~lb.matching("bias", "scale"),
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


def test_prefix_and_none():
    assert resolve_mask("mask", {"dense": True, "scale": False}, PARAMS) == [True, True, False]
    assert resolve_mask("mask", None, PARAMS) == [True] * 3


@pytest.mark.parametrize("form", FORMS)
def test_decays_what_optax_decays(form):
    assert resolve_mask("mask", FORMS[form], PARAMS) == [False, True, False]
    ours = lb.add_decayed_weights(0.5, FORMS[form])
    theirs = optax.add_decayed_weights(0.5, FORMS["function"])
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    updates, _ = ours.update(zeros, ours.init(PARAMS), PARAMS)
    expected, _ = theirs.update(zeros, theirs.init(PARAMS), PARAMS)
    jax.tree.map(np.testing.assert_array_equal, updates, expected)


def test_a_function_that_says_false_means_it():
    nothing = lambda params: False  # noqa: E731
    assert select_leaves("mask", nothing, PARAMS) == [False] * 3
    decay = lb.add_decayed_weights(0.5, nothing)
    updates = jax.tree.map(jnp.zeros_like, PARAMS)
    updates, _ = decay.update(updates, decay.init(PARAMS), PARAMS)
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), updates)


def test_what_is_hidden_may_be_what_is_meant():
    """`optax.partition` builds one optimizer for matrices and one for vectors, both alike."""
    parts = dict.fromkeys(("matrix", "vector"), lb.lamb(0.1, weight_decay_mask=lb.at_least_ndim(2)))
    labels = jax.tree.map(lambda leaf: "matrix" if leaf.ndim > 1 else "vector", PARAMS)
    optimizer = optax.partition(parts, labels)
    optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS)
    hidden = {"dense": {"kernel": optax.MaskedNode(), "bias": jnp.ones(2)}}
    assert select_leaves("mask", lb.matching("kernel"), hidden) == [False]
