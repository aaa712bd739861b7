"""Which axes of which parameters run over layers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_largebatch as lb
from tests.optimizers.registry import OPTIMIZERS

PARAMS = {
    "experts": {"kernel": jnp.ones((2, 3, 4, 5))},
    "head": {"kernel": jnp.ones((5, 6))},
    "layers": {"bias": jnp.ones((3, 5)), "kernel": jnp.ones((4, 3, 5))},
}
AXES = [(0, 1), (), (0,), (1,)]
FORMS = {
    "patterns": {"experts/": (0, 1), "layers/bias": 0, "layers/kernel": 1},
    "patterns that add up": {"experts/": 0, "experts/kernel": 1, "bias": 0, "layers/kernel": 1},
    "negative axes": {"experts/": (-4, -3), "bias": -2, "layers/kernel": -2},
    "integers of NumPy": {"experts/": (np.int32(0), 1), "bias": np.int64(0), "layers/kernel": 1},
    "a tree": {
        "experts": {"kernel": (1, 0)},
        "head": {"kernel": None},
        "layers": {"bias": 0, "kernel": 1},
    },
    "a prefix": {"experts": (0, 1), "head": None, "layers": {"bias": 0, "kernel": 1}},
    "a function": lambda params: {
        "experts": {"kernel": (0, 1)},
        "head": {"kernel": ()},
        "layers": {"bias": np.int64(0), "kernel": 1},
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_axes(form):
    stacked = lb.stacked_layers(FORMS[form])
    assert stacked.axes(PARAMS) == AXES
    assert stacked.sizes(PARAMS) == [6, 1, 3, 3]


def test_rules_and_mask_functions_see_one_layer():
    """A stack of biases has two axes, and none of them is a matrix."""
    stacked = lb.stacked_layers({"layers/bias": 0})
    params = {"layers": {"bias": jnp.ones((3, 5)), "kernel": jnp.ones((5, 5))}}
    rule = lb.at_least_ndim(2)

    def function(tree):
        return jax.tree.map(lambda x: x.ndim >= 2, tree)

    for mask in (rule, function):
        for optimizer in (
            lb.add_decayed_weights(1.0, mask, stacked=stacked),
            lb.lars(1.0, 1.0, mask, 1.0, trust_ratio_mask=mask, momentum=0, stacked=stacked),
        ):
            updates, _ = optimizer.update(
                jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params
            )
            np.testing.assert_array_equal(updates["layers"]["bias"], 0)
            assert np.all(np.abs(updates["layers"]["kernel"]) == 1)
    groups = lb.param_groups({"params": ~rule, "learning_rate": 0.0})
    optimizer = lb.lamb(1.0, groups=groups, stacked=stacked)
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    np.testing.assert_array_equal(updates["layers"]["bias"], 0)
    assert np.all(updates["layers"]["kernel"] != 0)


def test_each_layer_is_centralised_by_itself():
    gradients = jnp.arange(24.0).reshape(2, 3, 4) ** 2
    both = lb.centralize_gradients(output_axis=-1, stacked=lb.stacked_layers(lambda params: 0))
    apart = lb.centralize_gradients(output_axis=-1)
    updates, _ = both.update(gradients, both.init(gradients))
    for layer in range(2):
        expected, _ = apart.update(gradients[layer], apart.init(gradients[layer]))
        np.testing.assert_allclose(updates[layer], expected, rtol=1e-6)


def test_among_masked_parameters():
    """The trees that `optax.partition` makes of the parameters hide some of them."""
    for form in ("patterns", "a tree"):
        ours = lb.lamb(0.1, stacked=lb.stacked_layers(FORMS[form]))
        optimizer = optax.partition(
            {"ours": ours, "frozen": optax.set_to_zero()},
            {"experts": "ours", "head": "frozen", "layers": "ours"},
        )
        state = optimizer.init(PARAMS)
        _, state = optimizer.update(PARAMS, state, PARAMS)
        assert optax.tree.get(state, "trust_ratios").shape == (12,)


@pytest.mark.parametrize(
    ("where", "kind", "message"),
    [
        ({"layer_": 0}, ValueError, r"the pattern 'layer_' matches no parameter"),
        ({"layers/": 2}, ValueError, r"'layers/bias' of shape \(3, 5\) has no axis 2"),
        ({"layers/": 0, "bias": 0}, ValueError, r"'layers/bias' is given the axes \(0, 0\)"),
        ({"(": 0}, ValueError, r"'\(' is not a regular expression"),
        ({"layers": {"kernel": 0}}, ValueError, "must have the tree structure"),
        (lambda params: "layers", TypeError, "must have an integer, a tuple of integers or None"),
    ],
)
def test_what_is_wrong_is_an_error(where, kind, message):
    with pytest.raises(kind, match=message):
        lb.stacked_layers(where).axes(PARAMS)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"layers/": True}, "'layers/' must have an integer.*got True of type bool"),
        ({"layers/": (0, 1.5)}, "'layers//1' must have an integer.*got 1.5 of type float"),
        ({"layers": {"kernel": 0, "bias": 0.5}}, "'layers/bias' must have an integer.*got 0.5"),
        ("layers/", "stacked_layers: must have an integer.*got 'layers/' of type str"),
    ],
)
def test_axes_that_are_no_integers_are_an_error_when_they_are_written(where, message):
    with pytest.raises(TypeError, match=message):
        lb.stacked_layers(where)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_takes_the_patterns_alone(name):
    entry, patterns = OPTIMIZERS[name], {"layers/": 0}
    params = {"layers": {"kernel": jnp.ones((3, 4, 5)), "bias": jnp.ones((3, 5))}}
    short = jax.eval_shape(entry.make(stacked=patterns).init, params)
    assert short == jax.eval_shape(entry.make(stacked=lb.stacked_layers(patterns)).init, params)
    whole = entry.known(matrix_axes={"kernel": ((0, 1), 2)})
    apart = jax.eval_shape(entry.make(stacked={}, **whole).init, params)
    assert short != apart or name in ("eve", "muon")  # which keep no numbers of blocks
