"""Muon and MuonH in Levanter and Marin keep a sum of gradients, in states of their own."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_largebatch as lb
from tests.migration.switches import PARAMS, SCHEDULE, inject, state_after

BETA = 0.95


class ScaleByMuonHState(NamedTuple):
    momentum_buffer: Any


class ScaleByAdamHState(NamedTuple):
    count: Any
    mu: Any
    nu: Any


def scale_with_muonh():
    """Its momentum alone; what it makes of it is no part of its state."""

    def update(updates, state, params=None):
        sums = jax.tree.map(lambda m, g: BETA * m + g, state.momentum_buffer, updates)
        return sums, ScaleByMuonHState(sums)

    return optax.GradientTransformation(
        lambda params: ScaleByMuonHState(jax.tree.map(jnp.zeros_like, params)), update
    )


def scale_by_adamh():
    adam = optax.scale_by_adam(b2=0.95)

    def update(updates, state, params=None):
        updates, state = adam.update(updates, optax.ScaleByAdamState(*state), params)
        return updates, ScaleByAdamHState(*state)

    return optax.GradientTransformation(
        lambda params: ScaleByAdamHState(*adam.init(params)), update
    )


def levanters_muonh(learning_rate):
    """As its `MuonHConfig` builds it."""
    clip = optax.clip_by_global_norm(1.0)
    parts = {
        "muonh": optax.chain(clip, scale_with_muonh()),
        "adamh": optax.chain(clip, scale_by_adamh()),
        "adam": optax.chain(clip, optax.scale_by_adam(b2=0.95), optax.scale(-learning_rate)),
    }
    labels = {"kernel": "muonh", "head": "adamh", "bias": "adam"}
    return optax.partition(parts, {name: labels[name] for name in ALL})


ALL = PARAMS | {"head": PARAMS["kernel"]}
LEVANTER = inject(levanters_muonh, learning_rate=SCHEDULE)
SUMS = {"grad_averaging": False, "bias_correction": "none", "beta": BETA}
HEAD = {"adamh_mask": lb.matching("head")}


def levanters_state(optimizer=LEVANTER):
    state = optimizer.init(ALL)
    for _ in range(3):
        _, state = optimizer.update(ALL, state, ALL)
    return state


@pytest.mark.parametrize(
    "optimizer",
    [lb.muonh(SCHEDULE, **SUMS, **HEAD), lb.muon(0.1, matrix_mask=lb.matching("kernel"), **SUMS)],
    ids=["muonh", "muon"],
)
def test_every_parameter_takes_its_moments(optimizer):
    state = levanters_state()
    adopted = lb.adopt_state(optimizer, ALL, state)
    chex.assert_trees_all_equal_shapes_and_dtypes(adopted, optimizer.init(ALL))
    parts = state.inner_state.inner_states
    expected = {
        "kernel": parts["muonh"].inner_state[1].momentum_buffer["kernel"],
        "head": parts["adamh"].inner_state[1].mu["head"],
        "bias": parts["adam"].inner_state[1].mu["bias"],
    }
    found = {}
    for _, mu in optax.tree.get_all_with_path(adopted, "mu"):
        found |= {name: own for name, own in mu.items() if not isinstance(own, optax.MaskedNode)}
    chex.assert_trees_all_equal(found, expected)
    assert {int(count) for _, count in optax.tree.get_all_with_path(adopted, "count")} == {3}


def test_sums_are_told_from_means():
    old = optax.partition(
        {"muon": scale_with_muonh(), "adam": optax.adam(0.1)}, {"kernel": "muon", "bias": "adam"}
    )
    state, others = state_after(old), {"b2": 0.999}
    lb.adopt_state(lb.muonh(0.1, **SUMS, **others), PARAMS, state, old_optimizer=old)
    with pytest.raises(ValueError, match=r"an element of mu of 'kernel' is .* in old_optimizer"):
        lb.adopt_state(lb.muonh(0.1, beta=BETA, **others), PARAMS, state, old_optimizer=old)


def test_the_way_back():
    adopted = lb.adopt_state(LEVANTER, ALL, levanters_state())
    chex.assert_trees_all_equal(adopted.inner_state, levanters_state().inner_state)
