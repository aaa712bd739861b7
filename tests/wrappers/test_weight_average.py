"""The average of the weights: that of NumPy, wherever the parameters are and whatever is around."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import optax
import pytest

import optax_largebatch as lb
from tests import helpers
from tests.conftest import read_back
from tests.helpers import mesh_of, shardings_on
from tests.optimizers.registry import WRAPPERS
from tests.wrappers.steps import EIGHT_DEVICES, in_shards, steps

STEPS, HALF_LIFE = 12, 3.0
SGD = optax.sgd(0.1)


def averaging(inner):
    return lb.average_weights(inner, half_life=HALF_LIFE)


SPECS = {"kernel": P("fsdp"), "bias": P("fsdp")}


def network(dtype="float32"):
    return helpers.drawn({"kernel": (8, 4), "bias": (8,)}, dtype)


def gradients_of(params, index):
    return jax.tree.map(lambda x: 0.3 * x + 0.2 * jnp.cos(3 * x + index.astype(x.dtype)), params)


def trained(optimizer, params, steps=STEPS, **extra_args):
    """The carry after some steps, and the weights after each."""
    return helpers.trained(optimizer, params, gradients_of, jnp.arange(float(steps)), **extra_args)


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
    jax.tree.map(lambda x, y: assert_allclose(x, y, atol=tolerance), found, wanted)


@pytest.mark.parametrize(
    "half_life", [HALF_LIFE, optax.linear_schedule(1.0, 12.0, STEPS)], ids=["number", "ramp"]
)
def test_is_the_weighted_mean(half_life):
    optimizer = lb.average_weights(lb.lamb(0.1), half_life=half_life)
    (params, state), trajectory = jax.jit(lambda x: trained(optimizer, x))(network())
    half_lives = [half_life(t) if callable(half_life) else half_life for t in range(STEPS)]
    assert_close(lb.averaged_params(optimizer, state, params), expected(trajectory, half_lives))
    assert state.steps == STEPS


@EIGHT_DEVICES
@pytest.mark.parametrize("place", ["auto", "explicit", "shard_map"])
def test_on_a_mesh(place):
    optimizer = averaging(lb.lamb(0.1))
    if place == "shard_map":

        def run(params):
            (params, state), trajectory = trained(optimizer, params)
            return state.average, trajectory

        of_all = jax.tree.map(lambda spec: P(None, *spec), SPECS)
        average, trajectory = in_shards(run, (SPECS,), (SPECS, of_all))(network())
    else:
        kind = AxisType.Explicit if place == "explicit" else AxisType.Auto
        mesh = mesh_of(kind, fsdp=8)
        shardings = shardings_on(mesh, SPECS)
        with jax.set_mesh(mesh):
            params = jax.device_put(network(), shardings)
            (params, state), trajectory = jax.jit(lambda x: trained(optimizer, x))(params)
            average = jax.jit(lambda s, p: lb.averaged_params(optimizer, s, p))(state, params)
            for name, x in optimizer.init(params).average.items():
                assert x.sharding.is_equivalent_to(shardings[name], x.ndim)
    assert_close(average, expected(trajectory, [HALF_LIFE] * STEPS))


@pytest.mark.parametrize(
    "optimizer",
    [
        lb.accumulate_gradients(averaging(SGD), every=3),
        averaging(lb.accumulate_gradients(SGD, every=3)),
        averaging(optax.MultiSteps(SGD, 3).gradient_transformation()),
        averaging(
            optax.partition(
                dict.fromkeys("ab", lb.accumulate_gradients(SGD, every=3)),
                {"bias": "a", "kernel": "b"},
            )
        ),
    ],
    ids=["inside", "outside", "outside of optax.MultiSteps", "outside of several"],
)
def test_only_complete_macro_batches_count(optimizer):
    with jax.numpy_dtype_promotion("standard"):  # for optax.MultiSteps
        (params, state), trajectory = trained(optimizer, network())
    every_third = jax.tree.map(lambda x: x[2::3], trajectory)
    wanted = expected(every_third, [HALF_LIFE] * (STEPS // 3))
    assert_close(lb.averaged_params(optimizer, state, params), wanted)


@pytest.mark.parametrize("every", [None, 2], ids=["steps", "micro-batches"])
@pytest.mark.parametrize("side", ["inside", "outside"])
@pytest.mark.parametrize("wrapper", ["skip_bad_steps", "dynamic_loss_scale"])
def test_what_is_left_out_does_not_count(wrapper, side, every):
    """Neither a step nor a micro-batch, also not right after a step."""
    inner = SGD if every is None else lb.accumulate_gradients(SGD, every=every)
    leaving_out = WRAPPERS[wrapper]
    optimizer = averaging(leaving_out(inner)) if side == "inside" else leaving_out(averaging(inner))
    bad = [1.0, 1.0, jnp.nan, jnp.nan, 2.0, jnp.nan, 2.0, 3.0, 3.0]

    def average_after(values):
        gradients = [optax.tree.full_like(network(), value) for value in values]
        *_, (params, state) = steps(optimizer, gradients, params=network())
        return lb.averaged_params(optimizer, state, params), optax.tree.get(state, "steps")

    average, counted = average_after(bad)
    wanted, without = average_after([x for x in bad if x == x])
    jax.tree.map(assert_array_equal, average, wanted)
    assert counted == without == 6 // (every or 1)


@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("of_updates", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("wrap", [lambda inner: inner, lb.stochastic_rounding], ids=["", "rounded"])
def test_of_weights_that_are_rounded_once(dtype, of_updates, wrap):
    """With a half-life of next to nothing, the average is the weights that `optax` makes."""
    optimizer = lb.average_weights(wrap(optax.sgd(0.003)), half_life=1e-6)
    params = helpers.drawn({"kernel": (64, 64)}, dtype)
    gradients = helpers.drawn({"kernel": (64, 64)}, of_updates)
    for update in (optimizer.update, jax.jit(optimizer.update)):
        updates, state = update(gradients, optimizer.init(params), params)
        moved = optax.apply_updates(params, updates)["kernel"]
        # A CPU with float16 multiplies and adds in one instruction, and XLA lets it.
        unit = 2**-10 if dtype == of_updates == "float16" else 0
        moved = np.asarray(moved, "float32")
        assert_allclose(state.average["kernel"], moved, rtol=unit, atol=0)


def test_of_masters():
    """The average of weights in bfloat16 has more digits, if it is that of their masters."""
    optimizer = lb.master_weights(averaging(optax.sgd(1e-4)))
    (params, state), _ = trained(optimizer, network("bfloat16"))
    average = state.inner_state.average
    assert {x.dtype for x in jax.tree.leaves(average)} == {jnp.dtype("float32")}
    distance = optax.tree.norm(jax.tree.map(jnp.subtract, average, state.master))
    assert 0 < distance < 1e-3
    read = lb.averaged_params(optimizer, state, params)
    assert {x.dtype for x in jax.tree.leaves(read)} == {jnp.dtype("bfloat16")}


def test_goes_on_from_a_checkpoint(tmp_path):
    optimizer = averaging(lb.lans(0.1))
    (params, state), _ = trained(optimizer, network(), steps=STEPS)
    typed = read_back(state, tmp_path / "typed", jax.eval_shape(lambda: state))
    expected = lb.averaged_params(optimizer, state, params)
    for again in (typed, read_back(state, tmp_path)):
        found = lb.averaged_params(optimizer, again, params)
        jax.tree.map(assert_array_equal, found, expected)


SCALES = jnp.repeat(jnp.array([1.0, 3.0, 0.2]), 4)
FUSED = {
    "stacked": (lambda text: lb.hyperball(0.5, stacked={"kernel": text}), "rows (3 columns)"),
    "of unequal lengths": (
        lambda text: lb.hyperball(0.5, stacked={"kernel": text}),
        "rows columns=4+4+4",
    ),
    "in a partition": (
        lambda text: optax.partition(
            {"muonh": lb.muonh(0.5, matrix_axes={"kernel": text}, stacked={}), "others": SGD},
            {"kernel": "muonh", "bias": "others"},
        ),
        "rows (3 columns)",
    ),
}


@EIGHT_DEVICES
@pytest.mark.parametrize(
    ("name", "place"),
    [
        *((name, "one device") for name in FUSED),
        *(("of unequal lengths", place) for place in ("auto", "explicit")),
    ],
)
def test_each_matrix_in_a_parameter_has_the_norm_of_its_own_sphere(name, place):
    make, text = FUSED[name]
    params = helpers.drawn({"kernel": (8, 12)}, "float32")
    params["kernel"] *= SCALES[None]
    params |= {"bias": jnp.ones(3)} if "partition" in name else {}
    optimizer = averaging(make(text))
    (params, state), _ = trained(optimizer, params)
    kinds = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
    if place in kinds:
        mesh = mesh_of(kinds[place], x=2, y=4)
        params = {
            key: jax.device_put(x, NamedSharding(mesh, P("x", "y") if x.ndim > 1 else P()))
            for key, x in params.items()
        }
    read = jax.jit(lambda s, p: lb.averaged_params(optimizer, s, p))(state, params)
    assert not np.allclose(read["kernel"], params["kernel"], rtol=0.01)

    def norms(x):
        return [np.linalg.norm(matrix) for matrix in np.split(np.asarray(x["kernel"]), 3, 1)]

    assert_allclose(norms(read), norms(params), rtol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [{"stacked": {"kernel": 0}}, {"matrix_axes": {"kernel": "layers rows columns"}, "stacked": {}}],
)
def test_each_layer_has_the_norm_of_its_own_sphere(settings):
    params = {"kernel": jnp.cos(jnp.arange(60.0)).reshape(3, 4, 5) * SCALES[::4, None, None]}
    optimizer = averaging(lb.muonh(0.5, **settings))
    (params, state), _ = trained(optimizer, params)
    read = lb.averaged_params(optimizer, state, params)
    after, before = (np.linalg.norm(x["kernel"], axis=(1, 2)) for x in (read, params))
    assert_allclose(after, before, rtol=1e-5)


HIDDEN = {"bias": "frozen", "kernel": "trained"}
OF_SOME = {
    "partition": lambda inner: optax.partition(
        {"trained": inner, "frozen": optax.set_to_zero()}, HIDDEN
    ),
    "masked": lambda inner: optax.masked(inner, {"bias": False, "kernel": True}),
    "the last is hidden": lambda inner: optax.masked(inner, {"bias": True, "kernel": False}),
}


@pytest.mark.parametrize("on_spheres", [False, True])
@pytest.mark.parametrize("name", OF_SOME)
def test_parameters_without_an_average_come_back_as_they_are(name, on_spheres):
    inner = lb.muonh(0.1, others=SGD) if on_spheres else lb.lamb(0.1)
    optimizer = OF_SOME[name](averaging(inner))
    (params, state), trajectory = trained(optimizer, network())
    read = lb.averaged_params(optimizer, state, params)
    hidden, averaged = sorted(params, reverse=name == "the last is hidden")
    assert_array_equal(read[hidden], params[hidden])
    mean = expected(trajectory, [HALF_LIFE] * STEPS)[averaged]
    if on_spheres and averaged == "kernel":
        mean = mean * np.linalg.norm(params[averaged]) / np.linalg.norm(mean)
    assert_allclose(read[averaged], mean, rtol=1e-4, atol=1e-5)


def test_other_parameters_are_refused():
    optimizer = averaging(SGD)
    (params, state), _ = trained(optimizer, network())
    with pytest.raises(ValueError, match="params must be the parameters of the optimizer"):
        lb.averaged_params(optimizer, state, {"other": params["bias"]})


def test_a_state_without_an_average():
    with pytest.raises(ValueError, match="state must hold one average of the weights, got 0"):
        lb.averaged_params(lb.lamb(0.1), lb.lamb(0.1).init(network()), network())
