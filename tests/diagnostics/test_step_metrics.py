"""One flat dictionary of scalars for any state."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import optax_largebatch as lb
from tests.optimizers.registry import OPTIMIZERS, named

PARAMS = {
    "bias": jnp.zeros(3),
    "embed": jnp.full((8, 3), 5.0),
    "kernel": jnp.full((4, 3), 2.0),
}
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
        np.testing.assert_allclose(value, eager[name], rtol=1e-6, err_msg=name)
    return {name: float(value) for name, value in eager.items()}


def assert_metrics(found, **expected):
    assert list(found) == list(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)


def test_of_a_plain_optimizer():
    updates = jax.tree.map(lambda x: -0.1 * jnp.ones_like(x), PARAMS)
    gradients = jax.tree.map(lambda x: 2 * jnp.ones_like(x, "bfloat16"), PARAMS)
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
    rates = {key: rate for key, rate in found.items() if key.startswith("learning_rate")}
    assert rates == {"learning_rate": pytest.approx(expected)}


def test_before_the_first_step():
    optimizer = lb.skip_bad_steps(lb.lamb(RAMP))
    assert_metrics(
        metrics(optimizer.init(PARAMS)),
        learning_rate=0,
        **{f"trust_ratio/{end}": 1 for end in ("min", "median", "max")},
        skipped_steps=0,
    )


GROUPS = lb.param_groups(
    {"params": lb.matching("embed"), "learning_rate": optax.linear_schedule(0.4, 0.0, 4)},
    {"params": lb.matching("bias"), "weight_decay": 0.0},
)


@pytest.mark.parametrize(
    "wrap", [lambda x: x, lambda x: optax.masked(x, dict.fromkeys(PARAMS, True))]
)
def test_the_rate_of_each_group(wrap):
    state = trained(wrap(lb.lamb(RAMP, groups=GROUPS)), steps=2)
    found = metrics(state, PARAMS, groups=GROUPS)
    rates = {name: value for name, value in found.items() if name.startswith("learning_rate")}
    assert_metrics(
        rates,
        **{
            "learning_rate": 0.3,
            "learning_rate/matching('embed')": 0.3,
            "learning_rate/matching('bias')": 0.09,
        },
    )
    with pytest.raises(ValueError, match="params must be given with groups"):
        lb.step_metrics(state, groups=GROUPS)


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
    assert [name for name in found if "learning_rate" in name] == ["learning_rate"]


def test_mixed_precision_and_macro_batches():
    inner = lb.accumulate_gradients(lb.skip_bad_steps(lb.lamb(RAMP)), every=2)
    optimizer = lb.master_weights(lb.dynamic_loss_scale(inner, initial_scale=1024.0))
    found = metrics(trained(optimizer, steps=4, bad=(0,)))
    approximate = [name for name in found if name.startswith("trust_ratio")]
    assert [found.pop(name) for name in approximate] == pytest.approx([2, 3.5, 5], rel=1e-3)
    assert_metrics(
        found,
        learning_rate=0.1,
        skipped_steps=1,
        loss_scale=512,
        micro_step=1,
        macro_step=1,
    )


def test_a_state_read_back_as_dictionaries_and_lists():
    def untyped(node):
        if isinstance(node, tuple) and hasattr(node, "_fields"):
            return {name: untyped(own) for name, own in node._asdict().items()}
        return [untyped(own) for own in node] if isinstance(node, tuple) else node

    optimizer = lb.dynamic_loss_scale(lb.lamb(0.1), initial_scale=8.0)
    gradients = jax.tree.map(lambda x: 8 * x, PARAMS)
    _, state = optimizer.update(gradients, optimizer.init(PARAMS), PARAMS)
    read = untyped(state)
    assert isinstance(read, dict)
    found = lb.step_metrics(read)
    assert found.keys() >= {"loss_scale", "skipped_steps", "learning_rate", "trust_ratio/max"}
    jax.tree.map(np.testing.assert_array_equal, found, lb.step_metrics(state))


def test_the_noise_scale():
    optimizer = lb.accumulate_gradients(
        lb.chain(lb.measure_noise_scale(), lb.lamb(RAMP)), every=2, small_batches=True
    )
    state = optimizer.init(PARAMS)
    for value in (1.0, 3.0):
        gradients = jax.tree.map(lambda x, value=value: jnp.full_like(x, value), PARAMS)
        _, state = jax.jit(optimizer.update)(gradients, state, PARAMS)
    found = metrics(state)
    assert found["noise_scale"] == pytest.approx(float(lb.noise_scale(state).noise_scale))
    assert found["noise_scale"] == pytest.approx(2 / 3)  # variance 2, and 4 - 2 / 2


def test_a_ratio_that_is_not_finite_is_not_hidden():
    state = lb.lamb(0.1).init(PARAMS)
    found = lb.step_metrics(optax.tree.set(state, trust_ratios=jnp.array([1.0, 2.0, jnp.nan])))
    assert all(jnp.isnan(found[f"trust_ratio/{end}"]) for end in ("min", "median", "max"))


def test_copies_of_a_state_are_an_error():
    state = jax.tree.map(lambda x: jnp.stack([x, x]), trained(lb.skip_bad_steps(lb.eve(0.1))))
    with pytest.raises(ValueError, match=r"learning_rates has the shape \(2, 3\)"):
        lb.step_metrics(state)
    wrapped = lb.skip_bad_steps(optax.sgd(0.1))
    state = jax.tree.map(lambda x: jnp.stack([x, x]), wrapped.init(PARAMS))
    with pytest.raises(ValueError, match=r"skipped_steps has the shape \(2,\)"):
        lb.step_metrics(state)


def test_a_state_of_nothing_that_is_known():
    assert lb.step_metrics(optax.sgd(0.1).init(PARAMS)) == {}


@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="jax.shard_map is jax 0.7")
def test_norms_of_split_parameters_are_those_of_the_whole():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    specs = {"bias": P(), "embed": P("data"), "kernel": P("data")}
    optimizer = lb.lamb(RAMP)

    def step(params, gradients):
        updates, state = optimizer.update(gradients, optimizer.init(params), params)
        return lb.step_metrics(state, params, gradients=gradients, updates=updates)

    gradients = jax.tree.map(jnp.ones_like, PARAMS)
    expected = step(PARAMS, gradients)
    sharded = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(specs, specs), out_specs=P()))
    for name, value in sharded(PARAMS, gradients).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, err_msg=name)


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
    np.testing.assert_allclose(state[1].learning_rates, 0.02 * np.array([3 / 13, 1, 1, 1]))
    for found in (lb.step_metrics(state, params), lb.step_metrics(state, params)):
        rates = {name: float(x) for name, x in found.items() if name.startswith("learning_rate")}
        assert rates == {"learning_rate": pytest.approx(0.02)}
        assert 0 < found["angle/min"] <= found["angle/median"] <= found["angle/max"] <= 0.0201
