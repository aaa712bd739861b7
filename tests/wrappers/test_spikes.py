"""Steps far above the running level are left out, on all devices or on none."""

import chex
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import optax_largebatch as lb

PARAMS = {"bias": jnp.ones(3), "kernel": jnp.ones((8, 2))}
SIZE = np.sqrt(19)
"""The norm of a gradient of ones."""


def gradient(value):
    return jax.tree.map(lambda x: jnp.full_like(x, value), PARAMS)


def steps(optimizer, gradients, losses=None):
    """The parameters and states after each of some steps."""
    params, state = PARAMS, optimizer.init(PARAMS)
    update = jax.jit(optimizer.update)
    for index, own in enumerate(gradients):
        extra_args = {} if losses is None else {"loss": losses[index]}
        updates, state = update(own, state, params, **extra_args)
        params = optax.apply_updates(params, updates)
        yield params, state


CALM = [1.0, 1.2, 0.9, 1.1]


@pytest.mark.parametrize("of", ["gradient_norm", "loss"])
@pytest.mark.parametrize("inner", [lb.lamb, optax.sgd], ids=["ours", "foreign"])
def test_goes_on_as_if_the_step_had_not_been(inner, of):
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    values = [*CALM, 50.0, 1.0, 9.0, 0.5]
    optimizer = lb.skip_spikes(inner(schedule), window=4, of=of)
    if of == "loss":
        runs = steps(optimizer, [gradient(1.0 + i) for i in range(8)], np.float32(values))
        without = [gradient(1.0 + i) for i in (0, 1, 2, 3, 5, 7)]
    else:
        runs = steps(optimizer, map(gradient, values))
        without = map(gradient, [*CALM, 1.0, 0.5])
    *_, (params, state) = runs
    *_, (expected, plain) = steps(inner(schedule), without)
    chex.assert_trees_all_equal(params, expected)
    chex.assert_trees_all_equal(state.inner_state, plain)
    assert (int(state.skipped), int(state.skipped_in_a_row), bool(state.gave_up)) == (2, 0, False)


@pytest.mark.parametrize("seed", [0, 1])
def test_is_so_many_robust_deviations_above_the_median(seed):
    """Against a few lines of NumPy, on heavy-tailed numbers with some infinities among them."""
    window, deviations = 7, 2.5
    random = np.random.default_rng(seed)
    values = np.abs(random.standard_t(2, size=120)).astype("float32")
    values[random.integers(0, 120, 6)] = np.inf
    optimizer = lb.skip_spikes(optax.sgd(0.1), deviations=deviations, window=window)
    skipped = [int(s.skipped) for _, s in steps(optimizer, [gradient(v) for v in values])]
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
    np.testing.assert_array_equal(skipped, np.cumsum(expected))


def test_the_first_window_is_taken_but_for_what_is_not_finite():
    values = [1.0, 100.0, np.nan, np.inf, 0.01, 1.0, 1.0]
    seen = [
        int(s.skipped)
        for _, s in steps(lb.skip_spikes(optax.sgd(0.1), window=5), map(gradient, values))
    ]
    assert seen == [0, 0, 1, 2, 2, 2, 2]


def test_one_spike_does_not_hide_the_next():
    """It would raise a mean and a standard deviation far enough."""
    values = [*CALM, *CALM, 1000.0, 200.0, 50.0]
    *_, (_, state) = steps(lb.skip_spikes(optax.sgd(0.1), window=8), map(gradient, values))
    assert int(state.skipped) == 3


def test_numbers_that_hardly_vary_may_vary_a_little():
    values = [1.0] * 8 + [1.005, 1.007]
    *_, (_, state) = steps(lb.skip_spikes(optax.sgd(0.1), window=8), map(gradient, values))
    assert int(state.skipped) == 1


def test_says_when_there_are_too_many_in_a_row_and_learns_a_new_level():
    values = [*CALM, *CALM, *([10.0] * 8)]
    optimizer = lb.skip_spikes(lb.lamb(0.1), window=8, max_in_a_row=3)
    states = [state for _, state in steps(optimizer, map(gradient, values))]
    assert [int(state.skipped_in_a_row) for state in states[8:]] == [1, 2, 3, 4, 0, 0, 0, 0]
    assert [bool(state.gave_up) for state in states[8:]] == [False] * 2 + [True] * 6


def test_passes_leaves_without_gradient():
    optimizer = lb.skip_spikes(lb.lamb(0.1))
    gradients = {"bias": None, "kernel": jnp.full((8, 2), jnp.nan)}
    updates, state = optimizer.update(gradients, optimizer.init(PARAMS), PARAMS)
    assert updates["bias"] is None
    np.testing.assert_array_equal(updates["kernel"], 0)
    assert int(state.skipped) == 1


def test_inside_of_accumulation_the_mean_is_what_counts():
    """A pair of which one part is large and the other opposite is no spike."""
    optimizer = lb.accumulate_gradients(lb.skip_spikes(optax.sgd(1.0), window=2), every=2)
    pairs = [1.0, 1.0, 1.2, 1.2, 50.0, -48.0, 50.0, 50.0]
    *_, (params, state) = steps(optimizer, map(gradient, pairs))
    assert int(state.inner_state.skipped) == 1
    np.testing.assert_allclose(params["bias"], 1 - 1.0 - 1.2 - 1.0, rtol=1e-5)


def test_around_accumulation_single_micro_batches_are_left_out():
    optimizer = lb.skip_spikes(lb.accumulate_gradients(optax.sgd(1.0), every=2), window=2)
    *_, (params, state) = steps(optimizer, map(gradient, [1.0, 1.2, 1.0, 50.0, 1.2]))
    assert int(state.skipped) == 1
    np.testing.assert_allclose(params["bias"], 1 - 1.1 - 1.1, rtol=1e-5)
    assert lb.has_updated(state)


@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="jax.shard_map is jax 0.7")
@pytest.mark.parametrize("check_vma", [True, False])
def test_all_devices_or_none(check_vma):
    """The spike is in the shard of one of eight devices, and what counts is the whole norm."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    specs = {"bias": P(), "kernel": P("fsdp")}
    optimizer = lb.skip_spikes(lb.lars(0.1, trust_coefficient=1.0), window=2)

    def run(params, gradients):
        state = optimizer.init(params)
        for own in gradients:
            updates, state = optimizer.update(
                own, state, params, partition_specs=None if check_vma else specs
            )
        return optax.apply_updates(params, updates), state.skipped[None], state.values

    sharded = jax.jit(
        jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(specs, [specs] * 3),
            out_specs=(specs, P(), P()),
            check_vma=check_vma,
        )
    )
    spike = gradient(1.0) | {"kernel": PARAMS["kernel"].at[5, 0].set(20.0)}
    given = [gradient(1.0), gradient(1.2)]
    moved, skipped, values = sharded(PARAMS, [*given, gradient(1.1)])
    assert skipped == 0
    np.testing.assert_allclose(values, [1.1 * SIZE, 1.2 * SIZE], rtol=1e-6)
    assert all(np.all(np.asarray(leaf) != 1) for leaf in moved.values())
    stayed, skipped, _ = sharded(PARAMS, [*given, spike])
    assert skipped == 1
    chex.assert_trees_all_equal(stayed, PARAMS)


@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="jax.shard_map is jax 0.7")
def test_a_loss_that_differs_between_devices_is_an_error():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    optimizer = lb.skip_spikes(lb.lamb(0.1), of="loss")

    def step(params, losses):
        return optimizer.update(params, optimizer.init(params), params, loss=losses[0])[0]

    sharded = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    with pytest.raises(ValueError, match=r"loss must be the same .* 'data'. Call jax.lax.pmean"):
        sharded(PARAMS, jnp.ones(8))


def test_a_donated_state():
    optimizer = lb.skip_spikes(lb.lamb(0.1))
    step = jax.jit(optimizer.update, donate_argnums=1)
    step(PARAMS, optimizer.init(PARAMS), PARAMS)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"deviations": 0.0}, ValueError, r"deviations must be in \(0, inf\), got 0.0"),
        ({"of": "norm"}, ValueError, "of must be one of 'gradient_norm', 'loss', got 'norm'"),
        ({"window": 1}, ValueError, "window must be >= 2"),
        ({"max_in_a_row": 0}, ValueError, "max_in_a_row must be >= 1"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        lb.skip_spikes(lb.lamb(0.1), **arguments)


def test_bad_losses():
    optimizer = lb.skip_spikes(lb.lamb(0.1), of="loss")
    state = optimizer.init(PARAMS)
    for loss, error, message in (
        (None, ValueError, "loss must be given to `update`"),
        (jnp.ones(3), ValueError, r"loss must be a scalar, got an array of shape \(3,\)"),
        (1j, TypeError, "loss must be a number"),
    ):
        with pytest.raises(error, match=message):
            optimizer.update(PARAMS, state, PARAMS, loss=loss)
    with pytest.raises(TypeError, match="inner must be a gradient transformation"):
        lb.skip_spikes(lb.lamb)
