"""Rules select parameters by name and shape, and say when they select nothing."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_largebatch as lb
from tests.params.selection import selected

PARAMS = {
    "embed": jnp.ones((5, 2)),
    "layers": [{"dense": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}}],
    "norm": {"scale": jnp.ones(2), "bias": jnp.ones(2)},
    "gain": jnp.ones(()),
    "frozen": None,
}


EVERYTHING = {
    "embed",
    "layers/0/dense/kernel",
    "layers/0/dense/bias",
    "norm/scale",
    "norm/bias",
    "gain",
}


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (lb.matching("bias"), {"layers/0/dense/bias", "norm/bias"}),
        (lb.matching("norm/bias", "^gain$"), {"norm/bias", "gain"}),
        (lb.matching(r"layers/\d+/.*kernel"), {"layers/0/dense/kernel"}),
        (~lb.matching("bias", "scale"), {"embed", "layers/0/dense/kernel", "gain"}),
        (lb.at_least_ndim(2), {"embed", "layers/0/dense/kernel"}),
        (lb.at_least_ndim(0), EVERYTHING),
        (lb.at_least_ndim(2) & ~lb.matching("embed"), {"layers/0/dense/kernel"}),
        (lb.matching("gain") | lb.matching("embed"), {"gain", "embed"}),
        (~lb.matching("bias"), EVERYTHING - {"layers/0/dense/bias", "norm/bias"}),
    ],
)
def test_selects(rule, expected):
    assert selected(rule, PARAMS) == expected
    assert jax.tree.structure(rule.mask(PARAMS)) == jax.tree.structure(PARAMS)


def test_reads_as_it_is_written():
    rule = ~lb.matching("bias", "scale") & ~(lb.at_least_ndim(3) | lb.matching("embed"))
    assert repr(rule) == "(~matching('bias', 'scale') & ~(at_least_ndim(3) | matching('embed')))"


def test_is_no_callable_and_so_no_schedule():
    assert not callable(lb.matching("bias"))


def test_long_lists_of_names_are_cut():
    params = {f"layer_{index}": jnp.ones(1) for index in range(40)}
    with pytest.raises(ValueError, match=r"layer_1, .* and 28 more"):
        lb.matching("bias").mask(params)


def test_a_hidden_match_counts():
    hidden = optax.MaskedNode()
    params = {"kernel": jnp.ones(2), "bias": hidden}
    assert (~lb.matching("bias")).mask(params) == {"kernel": True, "bias": hidden}


@pytest.mark.parametrize("rule", [lb.matching("act"), lb.matching_kinds("bias")])
def test_none_is_no_parameter(rule):
    """It is the activation of a module, say, or the bias that it does not have."""
    params = {"kernel": jnp.ones((2, 2)), "act": None, "bias": None}
    with pytest.raises(ValueError, match="no parameter"):
        rule.mask(params)


def test_a_number_at_an_end_of_a_pattern_is_whole():
    params = [jnp.ones(2)] * 12
    assert lb.matching("1").mask(params) == [number == 1 for number in range(12)]
    assert lb.matching("^1").mask(params) == [number in (1,) for number in range(12)]
    named = {"layers": {str(number): jnp.ones(2) for number in (1, 10, 21)}}
    assert lb.matching("layers/1").mask(named) == {"layers": {"1": True, "10": False, "21": False}}
    assert lb.matching(r"layers/\d").mask(named) == {"layers": {"1": True, "10": True, "21": True}}


def test_a_list_without_names_is_said():
    with pytest.raises(ValueError, match=r"no names. Pass a dictionary, as in Keras {v.path: v."):
        lb.matching("kernel").mask([jnp.ones(2)] * 3)


def test_a_field_called_value_keeps_its_name():
    class Attention(NamedTuple):
        query: jax.Array
        value: jax.Array

    params = {"attention": Attention(jnp.ones(2), jnp.ones(2))}
    assert lb.matching("value").mask(params) == {"attention": Attention(False, True)}


def test_an_anchored_pattern_is_no_part_of_another_name():
    params = {"embeddings": jnp.ones((5, 2)), "linear": {"b": jnp.ones(2), "b2": jnp.ones(2)}}
    assert selected(lb.matching("b"), params) == {"embeddings", "linear/b", "linear/b2"}
    assert selected(lb.matching("(^|/)b$"), params) == {"linear/b"}


@pytest.mark.parametrize(
    ("combine", "says"),
    [
        (lambda rule: not rule, "&, | and ~"),
        (lambda rule: rule & (lambda params: True), r"matching\('bias'\) & .* a rule on its right"),
        (lambda rule: rule | True, r"matching\('bias'\) \| .* got True of type bool"),
        (lambda rule: rule & None, "got None"),
    ],
)
def test_wrong_combinations(combine, says):
    """Written `a and b`, the first rule was forgotten; the others failed where they were used."""
    with pytest.raises(TypeError, match=says):
        combine(lb.matching("bias"))


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: lb.matching(), ValueError, "at least one string"),
        (lambda: lb.matching("bias", ""), ValueError, "empty string"),
        (lambda: lb.matching(["bias"]), TypeError, r"separate .*got \['bias'\] of type list"),
        (lambda: lb.matching("("), ValueError, r"'\(' is not a regular expression"),
    ],
)
def test_wrong_patterns(make, error, says):
    with pytest.raises(error, match=rf"matching\(\).*{says}"):
        make()
