"""Steps that are not finite, or far above the running level, are left out, or on no device."""

import chex
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import optax
import pytest

import optax_largebatch as lb
from tests.helpers import first_step
from tests.wrappers.steps import (
    EIGHT_DEVICES,
    PARAMS,
    gradient,
    in_one_shard,
    in_shards,
    on_eight_devices,
    steps,
)

SIZE = np.sqrt(19)
"""The norm of a gradient of ones."""
CALM = [1.0, 1.2, 0.9, 1.1]
OF_FOUR = {"deviations": 6, "window": 4}
CASES = {
    "not finite": ({}, [1.0, np.nan, np.inf, -np.inf, 100.0], (1, 2, 3)),
    "spikes": (OF_FOUR, [*CALM, 50.0, 1.0, 9.0, np.nan, 0.5], (4, 6, 7)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("inner", [lb.lamb, optax.sgd], ids=["ours", "foreign"])
def test_goes_on_as_if_the_step_had_not_been(inner, name):
    options, values, bad = CASES[name]
    optimizer = inner(optax.linear_schedule(1.0, 0.0, 10))
    good = [value for index, value in enumerate(values) if index not in bad]
    *_, (params, state) = steps(lb.skip_bad_steps(optimizer, **options), map(gradient, values))
    *_, (expected, plain) = steps(optimizer, map(gradient, good))
    chex.assert_trees_all_equal((params, state.inner_state), (expected, plain))
    assert (int(state.skipped), int(state.skipped_in_a_row), bool(state.gave_up)) == (3, 0, False)


def test_a_spike_or_a_nan_of_the_loss():
    """The gradients are no spikes, and one of them is not finite beside a good loss."""
    losses = [{"loss": np.float32(x)} for x in (*CALM, 50.0, 1.0, np.nan, 1.0, 0.5)]
    gradients = [gradient(np.inf if index == 7 else 1.0 + 9 * index) for index in range(9)]
    optimizer = lb.skip_bad_steps(optax.sgd(0.1), of="loss", **OF_FOUR)
    *_, (params, state) = steps(optimizer, gradients, losses)
    *_, (expected, _) = steps(optax.sgd(0.1), [gradients[i] for i in (0, 1, 2, 3, 5, 8)])
    chex.assert_trees_all_equal(params, expected)
    assert (int(state.skipped), int(state.seen)) == (3, 8)


def test_the_state_is_the_same_with_and_without_spikes():
    plain, spikes, losses = (
        lb.skip_bad_steps(optax.sgd(0.1), **options)
        for options in ({}, {"deviations": 6}, {"deviations": 6, "of": "loss"})
    )
    chex.assert_trees_all_equal(plain.init(PARAMS), spikes.init(PARAMS), losses.init(PARAMS))
    _, state = first_step(plain, gradient(2.0), PARAMS)
    _, state = spikes.update(gradient(2.0), state)
    assert int(state.seen) == 1


@pytest.mark.parametrize("seed", [0, 1])
def test_is_so_many_robust_deviations_above_the_median(seed):
    """Against a few lines of NumPy, on heavy-tailed numbers with some infinities among them."""
    window, deviations = 7, 2.5
    random = np.random.default_rng(seed)
    values = np.abs(random.standard_t(2, size=120)).astype("float32")
    values[random.integers(0, 120, 6)] = np.inf
    optimizer = lb.skip_bad_steps(optax.sgd(0.1), deviations=deviations, window=window)
    skipped = [int(state.skipped) for _, state in steps(optimizer, map(gradient, values))]
    seen, expected = [], []
    for value in values * SIZE:
        limit = np.inf
        if len(seen) >= window:
            level = np.median(seen[-window:])
            deviation = 1.4826 * np.median(np.abs(seen[-window:] - level))
            limit = level + deviations * max(deviation, 1e-3 * level)
        expected.append(not np.isfinite(value) or value > limit)
        if np.isfinite(value):
            seen.append(value)
    assert sum(expected) > 15
    assert_array_equal(skipped, np.cumsum(expected))


def test_numbers_that_hardly_vary_may_vary_a_little():
    optimizer = lb.skip_bad_steps(optax.sgd(0.1), deviations=6, window=8)
    values = [1.0] * 8 + [1.005, 1.007]
    skipped = [int(state.skipped) for _, state in steps(optimizer, map(gradient, values))]
    assert skipped == [0] * 9 + [1]


def test_says_when_there_are_too_many_in_a_row():
    values = [np.nan, 1.0, np.nan, np.nan, 1.0, np.nan]
    optimizer = lb.skip_bad_steps(lb.lamb(0.1), max_in_a_row=2)
    states = [state for _, state in steps(optimizer, map(gradient, values))]
    assert [int(state.skipped_in_a_row) for state in states] == [1, 0, 1, 2, 0, 1]
    assert [bool(state.gave_up) for state in states] == [False, False, False, True, True, True]
    assert int(states[-1].skipped) == 4


@pytest.mark.parametrize("options", [{}, {"deviations": 6}], ids=["", "spikes"])
def test_passes_leaves_without_gradient(options):
    optimizer = lb.skip_bad_steps(lb.lamb(0.1), **options)
    gradients = {"bias": None, "kernel": jnp.full((8, 2), jnp.nan)}
    updates, state = first_step(optimizer, gradients, PARAMS)
    assert updates["bias"] is None
    assert_array_equal(updates["kernel"], 0)
    assert int(state.skipped) == 1


def test_inside_of_accumulation_the_mean_is_what_counts():
    """A pair of which one part is large and the other opposite is no spike."""
    inner = lb.skip_bad_steps(optax.sgd(1.0), deviations=6, window=2)
    optimizer = lb.accumulate_gradients(inner, every=2)
    pairs = [1.0, 1.0, 1.2, 1.2, 50.0, -48.0, 50.0, 50.0]
    *_, (params, state) = steps(optimizer, map(gradient, pairs))
    assert int(state.inner_state.skipped) == 1
    assert_allclose(params["bias"], 1 - 1.0 - 1.2 - 1.0, rtol=1e-5)


@EIGHT_DEVICES
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    ("options", "bad"), [({}, jnp.inf), ({"deviations": 6, "window": 2}, 20.0)]
)
def test_all_devices_or_none(check_vma, options, bad):
    """What is bad is in the shard of one of eight devices; what counts is the norm of all."""
    optimizer = lb.skip_bad_steps(lb.lars(0.1, trust_coefficient=1.0), **options)
    before = [gradient(1.0), gradient(1.2)]
    good, state = on_eight_devices(optimizer, [*before, gradient(1.1)], check_vma)
    assert int(state.skipped) == 0
    if options:
        assert_allclose(state.values, [1.1 * SIZE, 1.2 * SIZE], rtol=1e-6)
    stayed, state = on_eight_devices(optimizer, [*before, in_one_shard(bad)], check_vma)
    assert int(state.skipped) == 1
    chex.assert_trees_all_equal(stayed, on_eight_devices(optimizer, before, check_vma)[0])
    assert all(np.all(np.asarray(good[name]) != stayed[name]) for name in PARAMS)


@EIGHT_DEVICES
def test_a_loss_that_differs_between_devices_is_an_error():
    optimizer = lb.skip_bad_steps(lb.lamb(0.1), deviations=6, of="loss")

    def step(params, losses):
        return first_step(optimizer, params, params, loss=losses[0])[0]

    with pytest.raises(ValueError, match=r"loss must be the same .* 'fsdp'. Call jax.lax.pmean"):
        in_shards(step, (P(), P("fsdp")), P())(PARAMS, jnp.ones(8))


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (None, ValueError, "loss must be given to `update`"),
        (jnp.ones(3), ValueError, r"loss must be a scalar, got an array of shape \(3,\)"),
        (1j, TypeError, "loss must be a number"),
    ],
)
def test_bad_losses(loss, error, message):
    optimizer = lb.skip_bad_steps(lb.lamb(0.1), deviations=6, of="loss")
    with pytest.raises(error, match=message):
        first_step(optimizer, PARAMS, PARAMS, loss=loss)


def test_spikes_of_the_loss_need_deviations():
    with pytest.raises(ValueError, match="deviations must be given with of='loss'"):
        lb.skip_bad_steps(lb.lamb(0.1), of="loss")


def test_no_gradient_is_no_step_whatever_is_inside():
    zeros = optax.stateless(lambda updates, params: optax.tree.zeros_like(params))
    params = {"moved": jnp.ones(3), "frozen": jnp.ones(4)}
    gradients = params | {"frozen": None}
    optimizer = lb.skip_bad_steps(zeros)
    updates, _ = first_step(optimizer, gradients, params)
    assert updates["frozen"] is None
    assert not updates["moved"].any()
