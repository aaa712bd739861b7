"""Schedules of b1, b2 and beta: a plain loop in float64, in stacks, and on devices."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_largebatch as lb
from optax_largebatch.testing import check
from tests.conftest import enable_x64
from tests.helpers import first_step

STEPS = 4


def b1(step):
    return jnp.where(step < 2, 0.9, 0.6 + 0.02 * jnp.asarray(step, float))


def b2(step):
    return 0.99 - 0.01 * jnp.asarray(step, float)


def beta(step):
    """As nanochat's: up, then down."""
    return jnp.where(step < 3, 0.85 + 0.04 * jnp.asarray(step, float), 0.9)


CHAINS = {
    "nadam": lambda m, b, s: lb.scale_by_adam(m, b, nesterov=True),
    "second moment": lambda m, b, s: lb.scale_by_second_moment(b, stacked=s),
    "lamb": lambda m, b, s: lb.lamb(0.1, m, b, weight_decay=0.1, stacked=s),
    "lamb by step size": lambda m, b, s: lb.lamb(0.1, m, b, bias_correction="step_size", stacked=s),
    "lans": lambda m, b, s: lb.lans(0.1, b1=m, b2=b, weight_decay=0.1, stacked=s),
    "lans sequential": lambda m, b, s: lb.lans(0.1, b1=m, b2=b, order="sequential", stacked=s),
    "muon": lambda m, b, s: lb.muon(0.1, beta=m, others=optax.sgd(0.1), stacked=s),
    "muonh": lambda m, b, s: lb.muonh(0.1, beta=m, b1=m, b2=b, stacked=s),
    "adamh": lambda m, b, s: lb.adamh(0.1, b1=m, b2=b, stacked=s),
    "eve": lambda m, b, s: lb.eve(0.1, b1=m, b2=b),
}
STACKED = {"layers": 0}
rng = np.random.default_rng(0)
PARAMS = {
    "layers": rng.normal(size=(2, 8, 4)),
    "kernel": rng.normal(size=(8, 8)),
    "b": rng.normal(size=8),
}
GRADIENTS = [{name: rng.normal(size=x.shape) for name, x in PARAMS.items()} for _ in range(STEPS)]


def trained(optimizer_at, params):
    """The parameters after some steps of an optimizer that may be another one in each step."""
    state = optimizer_at(0).init(params)
    for t, gradients in enumerate(GRADIENTS):
        updates, state = optimizer_at(t).update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.fixture(autouse=True)
def float64():
    with enable_x64(True):
        yield


@pytest.mark.parametrize("name", CHAINS)
def test_each_step_has_the_numbers_of_its_own(name):
    """In each step an optimizer that is built with the numbers of that step takes over."""
    build = functools.partial(CHAINS[name], s=STACKED)
    whole = build(m=b1, b=b2)
    params = jax.tree.map(jnp.asarray, PARAMS)
    found, state = trained(lambda t: whole, params)
    expected, other = trained(lambda t: build(m=float(b1(t)), b=float(b2(t))), params)
    chex.assert_trees_all_close(found, expected, rtol=1e-12, atol=1e-12)
    assert jax.tree.structure(state) == jax.tree.structure(other)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lamb", "lans"])
def test_on_many_devices(name):
    params = {"one": PARAMS["kernel"], "other": PARAMS["kernel"].T}
    check(lambda stacked: CHAINS[name](b1, b2, stacked), params)


@pytest.mark.parametrize("wrong", [lambda step: 1.5, lambda step: jnp.ones(3)])
def test_what_a_schedule_returns_is_checked(wrong):
    optimizer = lb.lamb(0.1, b1=wrong)
    with pytest.raises(ValueError, match="b1: what the schedule returns must be"):
        first_step(optimizer, PARAMS, PARAMS)


def test_sixteen_bits_are_refused():
    optimizer = lb.muonh(0.1, beta=lambda step: jnp.bfloat16(0.9999), stacked=STACKED)
    with pytest.raises(ValueError, match=r"beta: what the schedule .* must be .* 32 bits"):
        first_step(optimizer, PARAMS, PARAMS)
