"""States from a checkpoint without its types: dictionaries and lists in the place of tuples."""

import chex
from flax import nnx
import jax.numpy as jnp
import optax
import pytest

import optax_largebatch as lb
from tests.conftest import read_back, slow_but
from tests.migration import switches
from tests.migration.switches import (
    ADAM,
    BY_LAYER,
    CONTRIB,
    INJECTED,
    MUONH,
    PARAMS,
    SCHEDULE,
    as_orbax,
)


def as_nnx(node):
    """The same of an `nnx.Optimizer`: arrays are in boxes, and lists are dictionaries, too."""
    if isinstance(node, list):
        node = {str(number): own for number, own in enumerate(node)}
    if isinstance(node, dict):
        return {name: as_nnx(own) for name, own in node.items()}
    return {"value": node}


RADII = {"learning_rate": SCHEDULE, "radius": "start", "b2": 0.999, "beta": 0.9}
STATES = {
    "adam": (switches.chained(ADAM), lb.lamb(0.1)),
    "sgd": (optax.sgd(SCHEDULE, 0.9), BY_LAYER),
    "contrib.muon": (CONTRIB, MUONH),
    "muonh": (lb.muonh(**RADII), lb.muonh(**RADII)),
    "muonh beside lamb": (lb.muonh(others=lb.lamb(0.1), **RADII), lb.muonh(**RADII)),
    "MultiSteps": (
        switches.micro(optax.adamw(SCHEDULE)),
        lb.accumulate_gradients(lb.lamb(0.1), every=2),
    ),
    "injected": (INJECTED, lb.skip_bad_steps(lb.lamb(0.1))),
    "hidden": (switches.without_bias(ADAM), switches.without_bias(lb.lamb(0.1))),
    "cain": (lb.cain(SCHEDULE), lb.cain(SCHEDULE)),
}


@pytest.mark.parametrize("name", slow_but(STATES.keys() - {"cain"}, STATES))
def test_is_adopted_as_with_its_types(name):
    old, new = STATES[name]
    state = switches.state_after(old, 3)
    old_optimizer = old if switches.sums_gradients(state) else None
    without = as_orbax(state)
    expected = lb.adopt_state(new, PARAMS, state, old_optimizer=old_optimizer)
    for untyped in (without, as_nnx(without)):
        adopted = lb.adopt_state(new, PARAMS, untyped, old_optimizer=old_optimizer)
        chex.assert_trees_all_equal(adopted, expected)


@pytest.mark.parametrize("name", ["muonh", "MultiSteps"])
def test_orbax_without_a_target(name, tmp_path):
    old, new = STATES[name]
    state = switches.state_after(old, 3)
    restored = read_back({"state": state}, tmp_path)
    chex.assert_trees_all_equal_structs(restored["state"], as_orbax(state))
    adopted = lb.adopt_state(new, PARAMS, restored["state"])
    chex.assert_trees_all_equal(adopted, lb.adopt_state(new, PARAMS, state))


def test_orbax_of_an_nnx_optimizer(tmp_path):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, lb.muonh(**RADII), wrt=nnx.Param)
    optimizer.update(model, nnx.state(model, nnx.Param))
    restored = read_back(nnx.state(optimizer), tmp_path)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    adopted = lb.adopt_state(optimizer.tx, params, restored["opt_state"])
    chex.assert_trees_all_equal(adopted, lb.adopt_state(optimizer.tx, params, optimizer.opt_state))
    assert jnp.all(adopted[1].radii[1:] > 0)


def test_a_parameter_may_have_the_name_of_a_field():
    kernel, bias = PARAMS.values()
    params = {"trace": kernel, "count": kernel, "mu": {"trace": bias}}
    optimizer = lb.muonh(**RADII)
    state = optimizer.init(params)
    for carried in (state, as_orbax(state)):
        chex.assert_trees_all_equal(lb.adopt_state(optimizer, params, carried), state)


def test_a_dictionary_does_not_say_whose_it_is():
    belief, new = optax.adabelief(0.1), lb.lamb(0.1)
    state = as_orbax(switches.state_after(belief))
    lb.adopt_state(new, PARAMS, state)
    with pytest.raises(ValueError, match="it keeps no moments, and state has moments of Adam"):
        lb.adopt_state(new, PARAMS, state, old_optimizer=belief)
