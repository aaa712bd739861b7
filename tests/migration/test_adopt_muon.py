"""Muon in the middle of a run: its momentum is a mean of gradients, and so is Adam's."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import optax
import pytest

import optax_largebatch as lb
from tests.conftest import enable_x64
from tests.helpers import trained
from tests.migration.switches import CONTRIB, HEAD, MUON, MUONH, PARAMS, SCHEDULE, state_after
from tests.optimizers.test_muon import CONVOLUTION, STACKED, network, numbers_of_optax, theirs

STEPS = 5


def go_on(optimizer, params, state, first):
    """The parameters and the state after some more updates."""

    def gradients(params, step):
        return jax.tree.map(lambda x: 0.3 * x + jnp.cos(3 * x + step), params)

    return trained(optimizer, params, gradients, jnp.arange(first, first + STEPS), state)[0]


@theirs
@pytest.mark.parametrize("ours_first", [False, True], ids=["from optax", "to optax"])
def test_a_run_goes_on_as_that_of_optax_would(ours_first):
    settings = {"learning_rate": optax.linear_schedule(0.02, 0.001, 10), "weight_decay": 0.1}
    peer = optax.contrib.muon(muon_weight_dimension_numbers=numbers_of_optax(), **settings)
    ours = lb.muon(matrix_axes=CONVOLUTION, stacked=STACKED, **settings)
    before, after = (ours, peer) if ours_first else (peer, ours)
    with enable_x64(True):
        params = network("float64")
        halfway, state = go_on(peer, params, peer.init(params), 0)
        expected, expected_state = go_on(peer, halfway, state, STEPS)
        params, state = go_on(before, params, before.init(params), 0)
        adopted = lb.adopt_state(after, params, state, old_optimizer=before)
        chex.assert_trees_all_equal_structs(adopted, after.init(params))
        params, state = go_on(after, params, adopted, STEPS)
        chex.assert_trees_all_close(params, expected, rtol=0, atol=1e-12)
        if ours_first:
            chex.assert_trees_all_close(state, expected_state, rtol=0, atol=1e-12)
    assert np.abs(expected["wide"] - halfway["wide"]).max() > 1e-3


def test_schedules_and_angles_go_on_and_a_radius_is_that_of_now():
    optimizer = lb.muonh(SCHEDULE, radius="start")
    adopted = lb.adopt_state(optimizer, PARAMS, state_after(CONTRIB, 4))
    counts = {int(count) for _, count in optax.tree.get_all_with_path(adopted, "count")}
    assert counts == {4}
    assert_array_equal(adopted[1].radii, 0)
    _, (_, sphere) = optimizer.update(PARAMS, adopted, PARAMS)
    assert_allclose(sphere.learning_rates, SCHEDULE(4) * np.array([3 / 13, 1]), 1e-6)
    assert_allclose(sphere.radii, [0, jnp.linalg.norm(PARAMS["kernel"])], rtol=1e-6)
    assert int(sphere.count) == 5


WITHOUT_SECOND_MOMENTS = {
    "muon to adamw": (MUON, optax.adamw(0.1)),
    "contrib.muon to lamb": (CONTRIB, lb.lamb(0.1)),
    "muonh to optax.lamb": (MUONH, optax.lamb(0.1)),
    "muonh to adamh": (MUONH, lb.adamh(0.1)),
    "a head that was Muon's": (MUON, HEAD),
}


@pytest.mark.parametrize("name", WITHOUT_SECOND_MOMENTS)
@pytest.mark.parametrize("compare", [False, True], ids=["", "compared"])
def test_muon_keeps_no_second_moments(name, compare):
    old, new = WITHOUT_SECOND_MOMENTS[name]
    says = "a momentum of Muon of 'kernel', and .* a second moment more.*see matrix_mask of muon"
    with pytest.raises(ValueError, match=says):
        lb.adopt_state(new, PARAMS, state_after(old), old_optimizer=old if compare else None)


def test_parts_that_have_counted_differently_are_refused():
    adams = optax.partition(
        {"a": optax.adam(0.1), "b": optax.adam(0.1)}, {"kernel": "a", "bias": "b"}
    )
    state = state_after(adams)
    inner = state.inner_states | {"b": adams.init(PARAMS).inner_states["b"]}
    state = state._replace(inner_states=inner)
    with pytest.raises(ValueError, match=r"step must be given.* has counted \[0, 2\]"):
        lb.adopt_state(lb.lamb(0.1), PARAMS, state)
    with pytest.raises(ValueError, match=r"that one part of optimizer moves, .* counted \[0, 2"):
        lb.adopt_state(lb.lamb(0.1), PARAMS, state, step=2)
    parts = lb.adopt_state(MUON, PARAMS, state, step=2)[0].inner_states
    (muon, *_), adam = (parts[name].inner_state for name in ("muon", "others"))
    assert (int(muon.count), int(adam.count)) == (2, 0)  # each has a count of its own


SPHERES = {"learning_rate": SCHEDULE, "radius": "start", "b2": 0.999}
NETWORK = {
    "head": jnp.ones((4, 3)),
    "layers": jnp.arange(1.0, 25.0).reshape(2, 3, 4),
    "scales": jnp.ones((2, 4)),
    "tail": jnp.ones(3),
}
LAYERS = {"layers": 0, "scales": 0}
RADII = [12**0.5, *np.linalg.norm(NETWORK["layers"], axis=(1, 2))]
"""Of the head and two layers. Behind them come three vectors."""


@pytest.mark.parametrize("old", ["adamh", "muonh", "muonh beside lamb"])
@pytest.mark.parametrize("new", ["muonh", "muonh beside lamb", "muonh beside optax"])
def test_radii_go_on(old, new):
    """Whichever optimizer moves the vectors, of which the spheres then know nothing."""
    spheres = SPHERES | {"stacked": LAYERS}
    optimizers = {
        "adamh": lb.adamh(**spheres),
        "muonh": lb.muonh(**spheres),
        "muonh beside lamb": lb.muonh(**spheres, others=lb.lamb(0.1, stacked=LAYERS)),
        "muonh beside optax": lb.muonh(**spheres, others=optax.adam(0.1)),
    }
    before, after = optimizers[old], optimizers[new]
    _, state = before.update(NETWORK, before.init(NETWORK), NETWORK)
    adopted = lb.adopt_state(after, NETWORK, state)
    expected = [*RADII, 0, 0, 0] if new == "muonh" else RADII
    assert_allclose(optax.tree.get(adopted, "radii"), expected, rtol=1e-6)


def test_blocks_that_are_others_now_have_no_radius():
    before = lb.muonh(**SPHERES, stacked=LAYERS)
    _, state = before.update(NETWORK, before.init(NETWORK), NETWORK)
    flat = lb.muonh(**SPHERES, matrix_axes={"layers": (1, 2)}, stacked={"scales": 0})
    assert_array_equal(lb.adopt_state(flat, NETWORK, state)[1].radii, 0)
