"""One flat dictionary of scalars for any state."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import optax
import pytest

import optax_largebatch as lb
from tests.diagnostics.test_diagnose import MATRICES, SCALES
from tests.migration.switches import as_orbax
from tests.optimizers.registry import OPTIMIZERS, named
from tests.wrappers.steps import EIGHT_DEVICES, in_shards

PARAMS = {"bias": jnp.zeros(3), "embed": jnp.full((8, 3), 5.0), "kernel": jnp.full((4, 3), 2.0)}
SGD = optax.sgd(0.1)
RAMP = optax.linear_schedule(0.1, 0.0, 10)
RATIOS = {"trust_ratio/min": 2.0, "trust_ratio/median": 3.5, "trust_ratio/max": 5.0}


def labels(params):
    return {name: "slow" if name == "embed" else "fast" for name in params}


def trained(optimizer, steps=1, params=PARAMS, bad=()):
    """The state after some steps with gradients of one; those that are bad hold an infinity."""
    with jax.numpy_dtype_promotion("standard"):
        state = optimizer.init(params)
        step = jax.jit(optimizer.update)
        for index in range(steps):
            value = jnp.inf if index in bad else 1.0
            gradients = jax.tree.map(lambda x, value=value: jnp.full_like(x, value), params)
            _, state = step(gradients, state, params)
    return state


def metrics(state, *args, **kwargs):
    """The metrics as numbers, after a look that they are the same when they are compiled."""
    eager = lb.step_metrics(state, *args, **kwargs)
    compiled = jax.jit(lambda state: lb.step_metrics(state, *args, **kwargs))(state)
    assert list(eager) == sorted(compiled, key=list(eager).index)
    for name, value in compiled.items():
        assert value.shape == ()
        assert_allclose(value, eager[name], rtol=1e-6, err_msg=name)
    return {name: float(value) for name, value in eager.items()}


def rates_in(found):
    name = "learning_rate"
    return {key.removeprefix(name): float(x) for key, x in found.items() if key.startswith(name)}


def assert_metrics(found, **expected):
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert_allclose(found[name], value, rtol=1e-5, err_msg=name)


def test_of_a_plain_optimizer():
    updates = jax.tree.map(lambda x: jnp.full_like(x, -0.1), PARAMS)
    gradients = jax.tree.map(lambda x: jnp.full_like(x, 2, "bfloat16"), PARAMS)
    found = metrics(trained(lb.lamb(RAMP)), PARAMS, gradients=gradients, updates=updates)
    elements = 3 + 8 * 3 + 4 * 3
    assert_metrics(
        found,
        learning_rate=0.1,
        gradient_norm=2 * elements**0.5,
        update_norm=0.1 * elements**0.5,
        param_norm=(24 * 25 + 12 * 4) ** 0.5,
        **RATIOS,
    )


@pytest.mark.parametrize("name", named(OPTIMIZERS))
def test_every_optimizer_tells_its_learning_rate(name):
    """The rate of the last step, as it was used."""
    entry = OPTIMIZERS[name]
    optimizer = entry.make(
        learning_rate=lambda step: 0.5 / (step + 1), **entry.known(warmup_epochs=0)
    )
    found = metrics(trained(optimizer, steps=4))
    # LBSGD takes a step for two of them, at twice the rate.
    expected = 2 * 0.5 / 2 if name == "lbsgd" else 0.5 / 4
    assert rates_in(found) == {"": pytest.approx(expected)}


def test_before_the_first_step():
    optimizer = lb.skip_bad_steps(lb.lamb(RAMP))
    expected = {"learning_rate": 0, **dict.fromkeys(RATIOS, 1), "skipped_steps": 0}
    assert_metrics(metrics(optimizer.init(PARAMS)), **expected)


def test_parts_of_a_partition_have_names():
    optimizer = optax.partition(
        {"fast": lb.lamb(RAMP), "slow": lb.skip_bad_steps(lb.lars(0.01))}, labels
    )
    found = metrics(trained(optimizer))
    assert found["learning_rate"] == found["learning_rate/fast"] == pytest.approx(0.1)
    assert found["learning_rate/slow"] == pytest.approx(0.01)
    assert found["skipped_steps"] == 0
    assert found["trust_ratio/max"] == pytest.approx(2.0)  # LARS has 0.001


def test_of_optax_and_its_wrappers():
    inner = optax.inject_hyperparams(optax.adam)(RAMP)
    optimizer = optax.apply_if_finite(
        optax.MultiSteps(inner, 2).gradient_transformation(), max_consecutive_errors=9
    )
    found = metrics(trained(optimizer, steps=6, bad=(1,)))
    assert_metrics(found, learning_rate=0.09, skipped_steps=1, micro_step=1, macro_step=2)


def test_the_rate_is_told_once_if_it_is_injected():
    """LBSGD multiplies it by its warm-up: the rate of the step is that of the link."""
    injected = optax.inject_hyperparams(lb.lbsgd, static_args=("batch_scale",))
    found = metrics(trained(injected(0.1, batch_scale=1, warmup_epochs=0)))
    assert list(rates_in(found)) == [""]


def test_mixed_precision_and_macro_batches():
    inner = lb.accumulate_gradients(lb.skip_bad_steps(lb.lamb(RAMP)), every=2)
    optimizer = lb.master_weights(lb.dynamic_loss_scale(inner, initial_scale=1024.0))
    found = metrics(trained(optimizer, steps=4, bad=(0,)))
    approximate = [name for name in found if name.startswith("trust_ratio")]
    assert [found.pop(name) for name in approximate] == pytest.approx([2, 3.5, 5], rel=1e-3)
    counted = {"skipped_steps": 1, "loss_scale": 512, "micro_step": 1, "macro_step": 1}
    assert_metrics(found, learning_rate=0.1, **counted)


def test_a_state_read_back_as_dictionaries_and_lists():
    state = trained(lb.dynamic_loss_scale(lb.lamb(0.1), initial_scale=8.0))
    read = as_orbax(state)
    assert isinstance(read, dict)
    found = lb.step_metrics(read)
    assert found.keys() >= {"loss_scale", "skipped_steps", "learning_rate", "trust_ratio/max"}
    jax.tree.map(assert_array_equal, found, lb.step_metrics(state))


NOISE = lb.accumulate_gradients(
    lb.chain(lb.measure_noise_scale(), lb.lamb(0.1)), every=2, small_batches=True
)


def test_the_noise_scale():
    state = NOISE.init(PARAMS)
    for value in (1.0, 3.0):
        gradients = jax.tree.map(lambda x, value=value: jnp.full_like(x, value), PARAMS)
        _, state = jax.jit(NOISE.update)(gradients, state, PARAMS)
    found = metrics(state)
    assert found["noise_scale"] == pytest.approx(float(lb.noise_scale(state).noise_scale))
    assert found["noise_scale"] == pytest.approx(2 / 3)  # variance 2, and 4 - 2 / 2


@pytest.mark.parametrize(
    "optimizer",
    [lb.lamb(0.1), lb.lamb(0.1, trust_ratio_mask=lb.matching("kernel")), lb.muonh(0.1), NOISE],
    ids=["lamb", "lamb of one", "muonh", "noise scale"],
)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_healthy_run_has_no_nan(optimizer, steps):
    """`jax_debug_nans` ends a run at any NaN that is computed, also at one that is thrown away."""
    state = trained(optimizer, steps)
    with jax.debug_nans(True):
        eager = lb.step_metrics(state, PARAMS, gradients=PARAMS)
        compiled = jax.jit(lambda state: lb.step_metrics(state, PARAMS, gradients=PARAMS))(state)
    assert eager.keys() == compiled.keys()


@pytest.mark.parametrize("ratios", [[3.0], [3.0, 1.0, 2.0], [9.0, 2.0, 1.0, 4.0, 3.0, 1.0]])
def test_the_median_is_that_of_the_adapted(ratios):
    state = optax.tree.set(lb.lamb(0.1).init(PARAMS), trust_ratios=jnp.array(ratios))
    adapted = [ratio for ratio in ratios if ratio != 1]
    assert metrics(state)["trust_ratio/median"] == np.median(adapted)


def test_copies_of_a_state_are_an_error():
    for inner, said in ((lb.eve(0.1), r"learning_rates .* \(2, 3\)"), (SGD, r"skipped_.* \(2,\)")):
        state = lb.skip_bad_steps(inner).init(PARAMS)
        with pytest.raises(ValueError, match=said):
            lb.step_metrics(jax.tree.map(lambda x: jnp.stack([x, x]), state))


def test_a_state_of_nothing_that_is_known():
    assert lb.step_metrics(SGD.init(PARAMS)) == {}


@EIGHT_DEVICES
def test_norms_of_split_parameters_are_those_of_the_whole():
    specs = {"bias": P(), "embed": P("fsdp"), "kernel": P()}
    optimizer = lb.lamb(RAMP)

    def step(params, gradients):
        updates, state = optimizer.update(gradients, optimizer.init(params), params)
        return lb.step_metrics(state, params, gradients=gradients, updates=updates)

    gradients = jax.tree.map(jnp.ones_like, PARAMS)
    found = in_shards(step, (specs, specs), P())(PARAMS, gradients)
    assert_metrics(dict(sorted(found.items())), **dict(sorted(step(PARAMS, gradients).items())))


def test_angles_and_rates_of_steps_on_spheres():
    """The head has Adam's direction and the same rate, the bias 3/13 of it."""
    params = {
        "bias": jnp.ones(3),
        "head": jnp.eye(3) + jnp.arange(9.0).reshape(3, 3),
        "kernel": jnp.eye(3) - jnp.arange(9.0).reshape(3, 3),
        "of_zeros": jnp.zeros((3, 3)),  # it does not move, and does not count
    }
    optimizer = lb.muonh(optax.linear_schedule(0.02, 0.0, 10), adamh_mask=lb.matching("head"))
    before = lb.step_metrics(optimizer.init(params), params)
    assert all(before[f"angle/{end}"] == 0 for end in ("min", "median", "max"))
    grads = jax.tree.map(jnp.cos, params)
    _, state = optimizer.update(grads, optimizer.init(params), params)
    assert_allclose(state[1].learning_rates, 0.02 * np.array([3 / 13, 1, 1, 1]))
    found = lb.step_metrics(state, params)
    assert rates_in(found) == {"": pytest.approx(0.02)}
    assert 0 < found["angle/min"] <= found["angle/median"] <= found["angle/max"] <= 0.0201


def test_metrics_of_muon():
    """It has none, unless another optimizer beside it has; a ratio that is off is 1."""
    params = MATRICES | {"bias": jnp.full(4, 0.5)}
    for optimizer, expected in (
        (lb.muon(0.1, others=lb.lamb(0.1)), [0.5] * 3),
        (lb.lbsgd(0.1), [1.0] * 3),
    ):
        found = lb.step_metrics(trained(optimizer, params=params), params)
        assert_allclose([found[name] for name in RATIOS], expected, rtol=1e-5)
    assert not RATIOS.keys() & lb.step_metrics(trained(lb.muon(0.1), params=params), params).keys()


@pytest.mark.parametrize("name", ["all are matrices", "no matrix is seen"])
def test_metrics_where_a_part_has_no_parameters(name):
    params = MATRICES
    if name == "no matrix is seen":
        params = SCALES | dict.fromkeys(MATRICES, optax.MaskedNode())
    optimizer = lb.muon(0.1, others=lb.lamb(0.1))
    found = lb.step_metrics(trained(optimizer, params=params), params)
    part = "muon" if params is MATRICES else "others"
    assert rates_in(found) == dict.fromkeys(["", f"/{part}"], pytest.approx(0.1))
    assert (RATIOS.keys() <= found.keys()) == (part == "others")
