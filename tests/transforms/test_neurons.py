"""NorMuon's part of Muon: recorded runs of three originals are in test_golden."""

import jax.numpy as jnp
from numpy.testing import assert_allclose
import pytest

import optax_largebatch as lb
from optax_largebatch.testing import check
from tests.conftest import slow_but
from tests.helpers import drawn, first_step


@pytest.mark.parametrize("side", slow_but(("longer",), ["columns", "longer"]))
def test_does_the_same_however_it_is_run(side):
    params = drawn({"kernel": (4, 6), "too": (4, 6), "tall": (8, 2)})
    check(lambda stacked: lb.normalize_neurons(side=side, stacked=stacked), params)


def test_the_norm_stays_and_neurons_become_equal():
    wide = drawn({"kernel": (8, 16)})["kernel"]
    for update, side, axis in ((wide, "columns", 0), (wide.T, "longer", 1)):
        transform = lb.normalize_neurons(0.0, eps=1e-30, side=side)
        found, _ = first_step(transform, update, update)
        lengths = jnp.linalg.norm(found, axis=axis)
        assert_allclose(lengths, lengths[0], rtol=1e-5)
        assert_allclose(jnp.linalg.norm(found), jnp.linalg.norm(update), rtol=1e-5)


def decayed(cautious):
    params = {"w": jnp.array([1.0, -1.0, 1.0, 2.0])}
    transform = lb.add_decayed_weights(0.1, cautious=cautious)
    updates = {"w": jnp.array([1.0, 1.0, 0.0, -3.0])}
    return first_step(transform, updates, params)[0]["w"]


def test_a_cautious_decay_goes_the_way_of_the_step():
    assert_allclose(decayed(cautious=False), [1.1, 0.9, 0.1, -2.8], rtol=1e-6)
    assert_allclose(decayed(cautious=True), [1.1, 1.0, 0.1, -3.0], rtol=1e-6)
