"""The average of the weights: that of NumPy, wherever the parameters are and whatever is around."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import optax_largebatch as lb

STEPS, HALF_LIFE = 12, 3.0
SPECS = {"kernel": P("d"), "bias": P("d")}


def network(dtype="float32"):
    rng = np.random.default_rng(0)
    shapes = {"kernel": (8, 4), "bias": (8,)}
    return {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in shapes.items()}


def gradients_of(params, index):
    return jax.tree.map(lambda x: 0.3 * x + 0.2 * jnp.cos(3 * x + index.astype(x.dtype)), params)


def trained(optimizer, params, steps=STEPS, **extra_args):
    """The carry after some steps, and the weights after each."""

    def step(carry, index):
        params, state = carry
        gradients = gradients_of(params, index)
        updates, state = optimizer.update(gradients, state, params, **extra_args)
        with jax.numpy_dtype_promotion("standard"):
            params = optax.apply_updates(params, updates)
        return (params, state), params

    indices = jnp.arange(steps, dtype="float32")
    return jax.lax.scan(step, (params, optimizer.init(params)), indices)


def expected(trajectory, half_lives):
    """The weighted mean of the weights: each step halves the earlier weights by its half-life."""
    decays = 0.5 ** (1 / np.asarray(half_lives))
    left = np.array([np.prod(decays[t + 1 :]) for t in range(len(decays))])
    weights = (1 - decays) * left

    def mean(x):
        x = np.asarray(x, "float64")
        return np.tensordot(weights / weights.sum(), x, axes=1)

    return jax.tree.map(mean, trajectory)


def assert_close(found, wanted, tolerance=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=tolerance), found, wanted)


@pytest.mark.parametrize(
    "half_life", [HALF_LIFE, optax.linear_schedule(1.0, 12.0, STEPS)], ids=["number", "ramp"]
)
def test_is_the_weighted_mean(half_life):
    optimizer = lb.average_weights(lb.lamb(0.1), half_life=half_life)
    (params, state), trajectory = jax.jit(lambda x: trained(optimizer, x))(network())
    half_lives = [half_life(t) if callable(half_life) else half_life for t in range(STEPS)]
    assert_close(lb.averaged_params(optimizer, state, params), expected(trajectory, half_lives))
    assert state.steps == STEPS


def test_changes_no_step():
    average = lb.average_weights(lb.lamb(0.1), half_life=HALF_LIFE)
    _, with_average = jax.jit(lambda x: trained(average, x))(network())
    _, without = jax.jit(lambda x: trained(lb.lamb(0.1), x))(network())
    jax.tree.map(np.testing.assert_array_equal, with_average, without)


@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="jax.shard_map is jax 0.7")
@pytest.mark.parametrize("place", ["auto", "explicit", "shard_map"])
def test_on_a_mesh(place):
    optimizer = lb.average_weights(lb.lamb(0.1), half_life=HALF_LIFE)
    kind = AxisType.Explicit if place == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    if place == "shard_map":

        def run(params):
            (params, state), trajectory = trained(optimizer, params)
            return state.average, trajectory

        of_all = jax.tree.map(lambda spec: P(None, *spec), SPECS)
        sharded = jax.shard_map(run, mesh=mesh, in_specs=(SPECS,), out_specs=(SPECS, of_all))
        average, trajectory = jax.jit(sharded)(network())
    else:
        shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
        with jax.set_mesh(mesh):
            params = jax.device_put(network(), shardings)
            (params, state), trajectory = jax.jit(lambda x: trained(optimizer, x))(params)
            average = jax.jit(lambda s, p: lb.averaged_params(optimizer, s, p))(state, params)
            for name, x in optimizer.init(params).average.items():
                assert x.sharding.is_equivalent_to(shardings[name], x.ndim)
    assert_close(average, expected(trajectory, [HALF_LIFE] * STEPS))


@pytest.mark.parametrize(
    "around",
    [
        lambda inner: lb.accumulate_gradients(
            lb.average_weights(inner, half_life=HALF_LIFE), every=3
        ),
        lambda inner: lb.average_weights(
            lb.accumulate_gradients(inner, every=3), half_life=HALF_LIFE
        ),
        lambda inner: lb.average_weights(
            optax.MultiSteps(inner, 3).gradient_transformation(), half_life=HALF_LIFE
        ),
    ],
    ids=["inside", "outside", "outside of optax.MultiSteps"],
)
def test_only_complete_macro_batches_count(around):
    optimizer = around(optax.sgd(0.1))
    with jax.numpy_dtype_promotion("standard"):  # for optax.MultiSteps
        (params, state), trajectory = trained(optimizer, network())
    every_third = jax.tree.map(lambda x: x[2::3], trajectory)
    wanted = expected(every_third, [HALF_LIFE] * (STEPS // 3))
    assert_close(lb.averaged_params(optimizer, state, params), wanted)


def test_of_masters():
    """The average of weights in bfloat16 has more digits, if it is that of their masters."""
    optimizer = lb.master_weights(lb.average_weights(optax.sgd(1e-4), half_life=HALF_LIFE))
    (params, state), _ = trained(optimizer, network("bfloat16"))
    average = state.inner_state.average
    assert {x.dtype for x in jax.tree.leaves(average)} == {jnp.dtype("float32")}
    distance = optax.tree.norm(jax.tree.map(jnp.subtract, average, state.master))
    assert 0 < distance < 1e-3
    read = lb.averaged_params(optimizer, state, params)
    assert {x.dtype for x in jax.tree.leaves(read)} == {jnp.dtype("bfloat16")}


def test_goes_on_from_a_checkpoint(tmp_path):
    optimizer = lb.average_weights(lb.lans(0.1), half_life=HALF_LIFE)
    (params, state), _ = trained(optimizer, network(), steps=STEPS)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", state)
        checkpointer.wait_until_finished()
        read = checkpointer.restore(tmp_path / "run", jax.eval_shape(lambda: state))
        untyped = checkpointer.restore(tmp_path / "run")
    for own in (read, untyped):
        found = lb.averaged_params(optimizer, own, params)
        jax.tree.map(
            np.testing.assert_array_equal, found, lb.averaged_params(optimizer, state, params)
        )


def test_parameters_and_state_can_be_used_up():
    optimizer = lb.average_weights(lb.lamb(0.1), half_life=HALF_LIFE)

    def step(params, state):
        updates, state = optimizer.update(params, state, params)
        return optax.apply_updates(params, updates), state

    params = network()
    jax.jit(step, donate_argnums=(0, 1))(params, optimizer.init(params))


def test_a_layer_on_a_sphere_has_the_norm_of_the_sphere():
    params = {"layers": {"kernel": jnp.stack([jnp.eye(4), 3 * jnp.eye(4)])}, "bias": jnp.ones(4)}
    inner = lb.muonh(0.5, stacked={"layers/": 0})
    optimizer = lb.average_weights(inner, half_life=10)
    (params, state), trajectory = trained(optimizer, params)
    mean = expected(trajectory, [10] * STEPS)
    inside = np.linalg.norm(mean["layers"]["kernel"], axis=(1, 2))
    assert np.all(inside < np.array([1.999, 5.999]))
    read = lb.averaged_params(optimizer, state, params)
    on_it = np.linalg.norm(read["layers"]["kernel"], axis=(1, 2))
    np.testing.assert_allclose(on_it, [2, 6], rtol=1e-5)
    np.testing.assert_allclose(
        read["layers"]["kernel"], mean["layers"]["kernel"] * (on_it / inside)[:, None, None], 1e-4
    )
    np.testing.assert_allclose(read["bias"], mean["bias"], rtol=1e-5)


def test_the_law_keeps_the_variance():
    """A noisy quadratic: k times the batch, with k times the rate and 1 / k of the half-life."""

    def variance(batch_scale):
        rate, half_life = 1e-3 * batch_scale, 400 / batch_scale
        optimizer = lb.average_weights(optax.sgd(rate), half_life=half_life)
        steps = 40_000 // batch_scale
        noise = jax.random.normal(jax.random.key(batch_scale), (steps, 256)) / batch_scale**0.5

        def step(carry, noise):
            params, state = carry
            updates, state = optimizer.update(params + noise, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), state.average

        start = jnp.zeros(256)
        _, averages = jax.lax.scan(step, (start, optimizer.init(start)), noise)
        return float(jnp.var(averages[steps // 4 :]))

    assert variance(16) == pytest.approx(variance(1), rel=0.05)


def test_says_what_is_wrong():
    with pytest.raises(ValueError, match=r"half_life must be in \(0, inf\), got 0"):
        lb.average_weights(lb.lamb(0.1), half_life=0.0)
    optimizer = lb.average_weights(lb.lamb(0.1), half_life=HALF_LIFE)
    params = network()
    state = optimizer.init(params)
    with pytest.raises(ValueError, match="params must be given to `update`"):
        optimizer.update(params, state)
    with pytest.raises(ValueError, match="state must hold one average of the weights, got 0"):
        lb.averaged_params(lb.lamb(0.1), lb.lamb(0.1).init(params), params)
