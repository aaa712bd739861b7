"""Stacks of layers that nobody has declared are never silent; the message says what to write."""

import warnings

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


def test_a_stack_that_the_patterns_leave_out():
    part = {"layers/dense": 0}
    with pytest.warns(
        UserWarning, match=r"1 of 4 .* 'layers/norm/scale' .*'\^layers/norm/scale\$'"
    ):
        lb.muonh(0.1, stacked=part).init(PARAMS)
    lb.muonh(0.1, stacked=part | {"norm/scale": None}).init(PARAMS)


def test_a_root_of_few_parameters_is_no_stack():
    lb.muonh(0.1, stacked={"layers": 0}).init({"layers": jnp.ones((8, 3, 2)), "bias": jnp.ones(8)})


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
