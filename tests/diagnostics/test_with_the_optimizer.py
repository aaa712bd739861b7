"""Readers that are given the optimizer know its stacks, masks and bounds, however it is wrapped."""

from flax import nnx
from flax.training.train_state import TrainState
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_largebatch as lb

STACKED = lb.stacked_layers({"layers/": 0})
PARAMS = {
    "head": jnp.full((8, 3), 2.0),
    "layers": {
        "bias": jnp.full((4, 8), 3.0),
        "kernel": jnp.ones((4, 8, 8)) * jnp.arange(5.0, 9.0).reshape(4, 1, 1),
    },
}
EXPECTED = {"head": 2.0, "layers/bias": [3.0] * 4, "layers/kernel": [5.0, 6.0, 7.0, 8.0]}
KERNELS = {"head": True, "layers": {"bias": False, "kernel": True}}


def lamb(**settings):
    """With gradients of one, the trust ratio of its first step is the size of the elements."""
    return lb.lamb(0.1, stacked=STACKED, **settings)


def after_a_step(optimizer, params=PARAMS):
    gradients = jax.tree.map(jnp.ones_like, params)
    with jax.numpy_dtype_promotion("standard"):
        return jax.jit(optimizer.update)(gradients, optimizer.init(params), params)[1]


def without(*names):
    return {name: ratio for name, ratio in EXPECTED.items() if name not in names}


def assert_ratios(ratios, expected):
    assert sorted(ratios) == sorted(expected)
    for name, ratio in expected.items():
        np.testing.assert_allclose(ratios[name], ratio, rtol=1e-2, err_msg=name)


WRAPPED = {
    "alone": (lamb, EXPECTED),
    "chain": (lambda: lb.chain(optax.clip_by_global_norm(99.0), lamb()), EXPECTED),
    "chain of optax": (lambda: optax.chain(lamb(), optax.scale(1.0)), EXPECTED),
    "inject_hyperparams": (
        lambda: optax.inject_hyperparams(lb.lamb, static_args=("stacked",))(0.1, stacked=STACKED),
        EXPECTED,
    ),
    "masked": (lambda: optax.masked(lamb(), KERNELS), without("layers/bias")),
    "a mask without moments": (
        lambda: optax.masked(lb.scale_by_trust_ratio(stacked=STACKED), KERNELS),
        without("layers/bias"),
    ),
    "partition, one part without stacks": (
        lambda: optax.partition(
            {"own": lamb(), "other": lb.lamb(0.1)}, {"layers": "own", "head": "other"}
        ),
        EXPECTED,
    ),
    "MultiSteps": (lambda: optax.MultiSteps(lamb(), 1), EXPECTED),
    "MultiSteps as a transformation": (
        lambda: optax.MultiSteps(lamb(), 1).gradient_transformation(),
        EXPECTED,
    ),
    "apply_if_finite": (lambda: optax.apply_if_finite(lamb(), 3), EXPECTED),
    "own wrappers": (
        lambda: lb.master_weights(
            lb.dynamic_loss_scale(
                lb.skip_bad_steps(lb.accumulate_gradients(lamb(), every=1), deviations=6),
                initial_scale=1.0,
            )
        ),
        EXPECTED,
    ),
    "stochastic_rounding": (lambda: lb.stochastic_rounding(lamb()), EXPECTED),
    "muon": (
        lambda: lb.muon(0.1, others=lamb(), stacked=STACKED),
        EXPECTED | {"head": 1.0, "layers/kernel": [1.0] * 4},
    ),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_trust_ratios_know_the_stacks(name):
    make, expected = WRAPPED[name]
    optimizer = make()
    state = after_a_step(optimizer)
    assert_ratios(lb.trust_ratios(optimizer, state, PARAMS), expected)
    assert isinstance(lb.diagnose(optimizer, state, PARAMS), list)


def test_under_jit_and_of_shapes():
    optimizer = lamb()
    state = after_a_step(optimizer)
    compiled = jax.jit(lambda state, params: lb.trust_ratios(optimizer, state, params))
    assert_ratios(compiled(state, PARAMS), EXPECTED)
    assert_ratios(lb.trust_ratios(optimizer, state, jax.eval_shape(lambda: PARAMS)), EXPECTED)


def test_a_state_inside_other_objects():
    optimizer = lamb()
    train = TrainState.create(apply_fn=None, params=PARAMS, tx=optimizer)
    train = train.replace(opt_state=after_a_step(optimizer))
    assert_ratios(lb.trust_ratios(train.tx, train, train.params), EXPECTED)

    @nnx.split_rngs(splits=4)
    @nnx.vmap
    def layers(rngs):
        return nnx.Linear(3, 3, rngs=rngs)

    model = layers(nnx.Rngs(0))
    stacking = lb.lamb(0.1, stacked=lb.stacked_layers(lambda params: 0))
    trainer = nnx.Optimizer(model, stacking, wrt=nnx.Param)
    params = nnx.state(model, nnx.Param)
    ratios = lb.trust_ratios(trainer.tx, trainer, params)
    assert {name: x.shape for name, x in ratios.items()} == {"bias": (4,), "kernel": (4,)}


def test_another_optimizer_is_an_error():
    optimizer = lamb()
    state = after_a_step(optimizer)
    with pytest.raises(ValueError, match="the trust ratios of 9 blocks, and params have 3"):
        lb.trust_ratios(lb.lamb(0.1, stacked={}), state, PARAMS)
    with pytest.raises(ValueError, match="which has trust ratios at 4; got a tuple with trust rat"):
        lb.trust_ratios(optimizer, after_a_step(lb.lans(0.1, stacked=STACKED)), PARAMS)
    for other in (lb.eve(0.1, stacked=STACKED), lb.muonh(0.1, stacked=STACKED)):
        with pytest.raises(ValueError, match="optimizer has no trust ratios"):
            lb.trust_ratios(other, after_a_step(other), PARAMS)


def test_two_parameters_of_one_name():
    params = {"a/b": jnp.ones(2), "a": {"b": jnp.ones(3)}}
    with pytest.raises(ValueError, match="several parameters called 'a/b'"):
        lb.trust_ratios(lb.lamb(0.1), after_a_step(lb.lamb(0.1), params), params)


def test_an_optimizer_whose_init_is_compiled_cannot_be_asked():
    optimizer = lamb()
    hidden = optax.GradientTransformation(jax.jit(optimizer.init), optimizer.update)
    state = after_a_step(hidden)
    with pytest.raises(ValueError, match="in place of one whose `init` is compiled"):
        lb.trust_ratios(hidden, state, PARAMS)
    assert_ratios(lb.trust_ratios(optimizer, state, PARAMS), EXPECTED)


@pytest.mark.parametrize("read", [lb.trust_ratios, lb.diagnose])
def test_the_optimizer_comes_first(read):
    state = after_a_step(lamb())
    with pytest.raises(TypeError, match="optimizer must be a gradient transformation, and comes f"):
        read(state, PARAMS, PARAMS)
    with pytest.raises(TypeError, match="optimizer must be a gradient transformation, and comes f"):
        lb.explain(PARAMS, PARAMS)
    with pytest.raises(TypeError, match="state must be the state of an optimizer"):
        lb.step_metrics(lamb(), state)


SCALES = {f"scale_{index}": jnp.ones(8) for index in range(4)}
MATRICES = {f"kernel_{index}": jnp.full((2, 2), 1.5 + index / 10) for index in range(8)}


@pytest.mark.parametrize("make", [lb.lamb, lb.lans], ids=lambda make: make.__name__)
def test_no_bound_is_reported_where_none_is_set(make):
    """The ratios of scales that all begin at 1 are the same after a step, by chance."""
    optimizer = make(0.01)
    params = MATRICES | SCALES
    state = after_a_step(optimizer, params)
    assert not any("bound" in sentence for sentence in lb.diagnose(optimizer, state, params))


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        ((None, 2.05), "2 of 8 trust ratios are at an upper bound, 2.05"),
        ((1.75, None), "3 of 8 trust ratios are at a lower bound, 1.75"),
        ((None, 2.15), "1 of 8 trust ratios are at an upper bound, 2.15"),
        ((0.1, 100.0), ""),
    ],
)
def test_bounds_are_known(bounds, said):
    optimizer = lb.lamb(0.1, trust_ratio_bounds=bounds)
    found = lb.diagnose(optimizer, after_a_step(optimizer, MATRICES), MATRICES)
    assert [sentence[: len(said)] for sentence in found] == ([said] if said else [])


def test_a_bound_behind_wrappers_and_in_lars():
    bounded = lb.lars(0.1, trust_ratio_bounds=(None, 1e-3))
    optimizer = lb.skip_bad_steps(optax.chain(optax.scale(1.0), bounded))
    (found,) = lb.diagnose(optimizer, after_a_step(optimizer, MATRICES), MATRICES)
    assert found.startswith("8 of 8 trust ratios are at an upper bound, 0.001")


def test_nothing_is_layer_wise_where_nothing_is_adapted():
    optimizer = lb.lbsgd(0.1)
    found, *_ = lb.diagnose(optimizer, after_a_step(optimizer, MATRICES), MATRICES)
    assert found.startswith("There is nothing layer-wise here")
    assert lb.diagnose(lb.muon(0.1), after_a_step(lb.muon(0.1), MATRICES), MATRICES) == []


def ratios_in(metrics):
    return {name: float(x) for name, x in metrics.items() if name.startswith("trust_ratio")}


def test_metrics_of_muon():
    """Its ratios are 1 unless it is asked for them, and stay in the state."""
    params = MATRICES | {"bias": jnp.full(4, 0.5)}
    for optimizer, expected in (
        (lb.muon(0.1), [1.0] * 3),
        (lb.muon(0.1, others=lb.lamb(0.1)), [0.5] * 3),
        (lb.lbsgd(0.1), [1.0] * 3),
    ):
        found = lb.step_metrics(after_a_step(optimizer, params), params)
        np.testing.assert_allclose(list(ratios_in(found).values()), expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["all are matrices", "none is a matrix"])
def test_metrics_where_a_part_has_no_parameters(name):
    params = MATRICES if name == "all are matrices" else SCALES
    optimizer = lb.muon(0.1, others=lb.lamb(0.1), trust_ratio=True)
    found = lb.step_metrics(after_a_step(optimizer, params), params)
    part = "muon" if params is MATRICES else "others"
    rates = {name: float(x) for name, x in found.items() if name.startswith("learning_rate")}
    assert rates == dict.fromkeys(["learning_rate", f"learning_rate/{part}"], pytest.approx(0.1))
    assert len(ratios_in(found)) == 3
