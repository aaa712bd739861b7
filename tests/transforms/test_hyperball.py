"""Steps on a sphere: their numbers, their norms over many steps, and what must not move."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose
import optax
import pytest

import optax_largebatch as lb
from tests.helpers import drawn
from tests.wrappers.steps import steps

RATES = (1.0, 1e-2, 1e-4, 1e-6)


def arrays(shape=(48, 32), dtype="float32"):
    rng = np.random.default_rng(0)
    param = rng.normal(size=shape)
    return jnp.asarray(param, dtype), jnp.asarray(rng.normal(size=shape) + 0.3 * param, dtype)


def step(transform, param, direction, state=None):
    state = transform.init(param) if state is None else state
    return jax.jit(transform.update)(direction, state, param)


def difference(param, direction, rate, radius=None):
    """The step in NumPy's float64, as it reads."""
    w, u = np.asarray(param, "float64"), np.asarray(direction, "float64")
    radius = np.linalg.norm(w) if radius is None else radius
    moved = w - rate * radius * u / np.linalg.norm(u)
    return radius * moved / np.linalg.norm(moved) - w


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("radius", ["now", "start", 30.0])
def test_has_the_digits_of_float32_at_all_rates(rate, radius):
    """With `1 / s - 1` in the place of `-d / (s (1 + s))` it is 1e-3 wrong at a rate of 1e-4."""
    param, direction = arrays()
    found, _ = step(lb.hyperball(rate, radius=radius), param, direction)
    expected = difference(param, direction, rate, None if isinstance(radius, str) else radius)
    error = np.linalg.norm(np.asarray(found, "float64") - expected) / np.linalg.norm(expected)
    assert error < 1e-6


@pytest.mark.parametrize("rate", [0.3, 1e-3])
def test_says_by_which_angle_it_has_turned(rate, x64):
    param, direction = arrays(dtype="float64")
    found, state = step(lb.hyperball(rate), param, direction)
    cos = jnp.vdot(param, param + found) / jnp.vdot(param, param)
    assert state.angles[0] == pytest.approx(float(jnp.arccos(cos)), rel=1e-6)
    assert state.learning_rates[0] == pytest.approx(rate)


@pytest.mark.parametrize("radius", ["now", "start", 2.0])
def test_does_not_turn_without_a_direction(radius):
    """A radius that is given is where the first step brings a block, with a direction or not."""
    param, direction = arrays((4, 3, 2))
    param, direction = param.at[0].set(0), direction.at[1].set(0)
    transform = lb.hyperball(0.1, radius=radius, stacked=lb.stacked_layers({"w": 0}))
    updates, state = step(transform, {"w": param}, {"w": direction})
    moved = jnp.any(updates["w"] != 0, axis=(1, 2))
    assert moved.tolist() == [True, radius == 2.0, True, True]
    if radius == 2.0:
        norms = jnp.linalg.norm((param + updates["w"]).reshape(4, 6), axis=1)
        chex.assert_trees_all_close(norms, jnp.full(4, 2.0), rtol=1e-5)
    assert (state.angles[1:] > 0).tolist() == [False, True, True]


def norms_over_steps(transform, params, directions):
    """The norms of the blocks of a stack after each step."""
    taken = [*steps(transform, [{"w": x} for x in directions], params=params)]
    blocks = np.array([own["w"].reshape(len(own["w"]), -1) for own, _ in taken])
    return np.linalg.norm(blocks, axis=2), taken[-1][1]


@pytest.mark.parametrize("radius", ["now", "start"])
def test_a_block_of_zeros_grows_to_the_sphere_of_its_ball(radius, x64):
    """It takes steps of the rate times the radius, and is never beyond it, nor is it rescaled."""
    param, direction = arrays((2, 8, 2), "float64")
    param = param.at[0].set(0)
    transform = lb.hyperball(0.25, radius=radius, stacked={"w": 0})
    norms, state = norms_over_steps(transform, {"w": param}, [direction] * 6)
    ball = 16**0.25
    assert_allclose(norms[:, 0], ball * np.minimum(0.25 * np.arange(1, 7), 1))
    assert_allclose(norms[:, 1], np.linalg.norm(param[1]))
    started = np.linalg.norm(param[1]) if radius == "start" else 0
    assert_allclose(state.radii, [-ball, started])


def test_a_block_in_its_ball_may_come_back(x64):
    """Only beyond the radius is it brought back; inside it is free, and has no angle."""
    param, direction = arrays((1, 8, 2), "float64")
    transform = lb.hyperball(0.25, stacked={"w": 0})
    norms, state = norms_over_steps(transform, {"w": 0 * param}, [direction, -direction, direction])
    assert_allclose(norms[:, 0], [0.5, 0, 0.5], atol=1e-12)
    assert state.angles.tolist() == [0.0]


def test_a_block_of_zeros_without_a_direction_waits():
    """As the first matrix of an adapter, whose gradient is zero until the second has moved."""
    param, direction = arrays((1, 8, 2))
    transform = lb.hyperball(0.25, stacked={"w": 0})
    norms, _ = norms_over_steps(transform, {"w": 0 * param}, [0 * direction, direction])
    assert_allclose(norms[:, 0], [0, 0.5], rtol=1e-6)


def test_each_part_of_an_axis_has_a_ball_of_its_size(x64):
    param, direction = arrays((8, 6), "float64")
    transform = lb.hyperball(1.0, stacked={"w": "rows columns=4+1+1"})
    updates, state = step(transform, {"w": 0 * param}, {"w": direction})
    norms = [np.linalg.norm(x) for x in np.split(np.asarray(updates["w"]), [4, 5], 1)]
    assert_allclose(norms, np.array([32, 8, 8]) ** 0.25)
    assert_allclose(-state.radii, norms)


def test_stays_where_a_step_leads_to_the_center():
    found, state = step(lb.hyperball(1.0), jnp.array([3.0, 4.0]), jnp.array([0.6, 0.8]))
    assert found.tolist() == [0.0, 0.0]
    assert state.angles.tolist() == [0.0]


def test_nan_reaches_its_block_alone():
    param, direction = arrays((4, 3, 2))
    direction = direction.at[2, 0, 0].set(jnp.nan)
    transform = lb.hyperball(0.1, stacked=lb.stacked_layers({"w": 0}))
    found, _ = step(transform, {"w": param}, {"w": direction})
    assert jnp.isnan(found["w"]).any(axis=(1, 2)).tolist() == [False, False, True, False]


def test_the_radius_at_the_start_is_kept_when_something_else_moves_the_parameters():
    param, direction = arrays()
    for radius, kept in (("start", 1.0), ("now", 2.0)):
        transform = lb.hyperball(0.1, radius=radius)
        found, state = step(transform, param, direction)
        larger = 2 * (param + found)
        found, _ = step(transform, larger, direction, state)
        ratio = jnp.linalg.norm(larger + found) / jnp.linalg.norm(param)
        assert ratio == pytest.approx(kept, rel=1e-5)


def drift(transform, param, steps):
    """The largest distance from the first norm over many steps, in units of it."""
    first = jnp.linalg.norm(param.astype("float32"))

    def one(carry, number):
        param, state, largest = carry
        direction = jnp.cos(number + 7 * jnp.arange(param.size, dtype="float32"))
        gradient = direction.reshape(param.shape).astype(param.dtype)
        updates, state = transform.update(gradient, state, param)
        with jax.numpy_dtype_promotion("standard"):  # optax's is not strict
            param = optax.apply_updates(param, updates)
        masters = getattr(state, "master", param)
        ratio = jnp.linalg.norm(jax.tree.leaves(masters)[0].astype("float32")) / first
        return (param, state, jnp.maximum(largest, jnp.abs(ratio - 1))), None

    start = (param, transform.init(param), jnp.zeros([]))
    numbers = jnp.arange(steps, dtype="float32")
    return float(jax.jit(lambda x: jax.lax.scan(one, x, numbers)[0][2])(start))


@pytest.mark.slow
@pytest.mark.parametrize("radius", ["now", "start"])
@pytest.mark.parametrize("rate", [0.02, 1e-4])
def test_100_000_steps_leave_the_norm_within_a_hundred_thousandth(radius, rate):
    param, _ = arrays((16, 16))
    assert drift(lb.hyperball(rate, radius=radius), param, 100_000) < 1e-5


@pytest.mark.slow
def test_100_000_steps_in_bfloat16_with_masters():
    param = arrays((16, 16))[0].astype("bfloat16")
    optimizer = lb.master_weights(lb.hyperball(0.02, radius="start"))
    assert drift(optimizer, param, 100_000) < 1e-5


def test_bfloat16_without_masters_loses_steps_and_the_norm():
    """What the docstring warns of."""
    param, direction = arrays((64, 64), "bfloat16")
    for rate, share in ((1e-3, 0.79), (1e-2, 0.18)):
        found, _ = step(lb.hyperball(rate), param, direction)
        stayed = float(jnp.mean(optax.apply_updates(param, found) == param))
        assert stayed == pytest.approx(share, abs=0.03)
    assert drift(lb.hyperball(1e-2), param, 1000) > 1e-3


def test_the_learning_rate_may_be_a_schedule_and_differ_between_groups():
    shapes = {"a": (4, 3), "b": (4, 3)}
    groups = lb.param_groups({"params": lb.matching("a"), "learning_rate_scale": 0.5})
    transform = lb.hyperball(groups.per_group("learning_rate", optax.linear_schedule(0.2, 0.0, 10)))
    _, state = step(transform, drawn(shapes), drawn(shapes, seed=1))
    chex.assert_trees_all_close(state.learning_rates, jnp.array([0.1, 0.2]))


def test_a_given_radius_may_be_injected():
    param, direction = arrays()
    optimizer = optax.inject_hyperparams(lb.hyperball)(learning_rate=0.1, radius=3.0)
    found, _ = step(optimizer, param, direction)
    assert jnp.linalg.norm(param + found) == pytest.approx(3.0, rel=1e-5)


@pytest.mark.parametrize("radius", ["now", "start", 2.0])
def test_what_the_mask_leaves_out_takes_a_step_of_the_rate(radius):
    params = {"bias": jnp.zeros((3, 2)), "kernel": jnp.ones((3, 2, 2))}
    transform = lb.hyperball(
        0.1, radius=radius, trust_ratio_mask=lb.at_least_ndim(2), stacked={"bias|kernel": 0}
    )
    found, state = step(transform, params, params | {"bias": jnp.ones((3, 2))})
    chex.assert_trees_all_close(found["bias"], jnp.full((3, 2), -0.1))
    assert state.radii.shape == (6,)
