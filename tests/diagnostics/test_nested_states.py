"""Readers of a run find their part of any state, and say which parameters it is about."""

import functools
from typing import NamedTuple

from flax import nnx
from flax.training.train_state import TrainState
import jax
import jax.numpy as jnp
from numpy.testing import assert_allclose
import optax
import pytest

import optax_largebatch as lb
from tests.conftest import read_back, slow_but
from tests.diagnostics import test_diagnose

PARAMS = {
    "a": jnp.full((4, 2), 2.0) * jnp.arange(1.0, 5.0)[:, None],
    "rest": {"b": jnp.full((3, 3), 3.0), "c": jnp.full((4, 2), 5.0)},
    "tail": (jnp.full(6, 7.0),),
}
EXPECTED = {"a": [2.0, 4.0, 6.0, 8.0], "rest/b": 3.0, "rest/c": 5.0, "tail/0": 7.0}
"""With gradients of one, LAMB's trust ratio in the first step is the size of the elements."""
STACKED = lb.stacked_layers({"^a$": 0})


def lamb(**settings):
    return lb.lamb(0.1, stacked=STACKED, **settings)


def only(*names):
    """A mask of the parameters with these names."""
    return lb.matching(*(f"^{name}$" for name in names)).mask


def partition(fast, slow, frozen):
    labels = {"a": "fast", "rest": {"b": "slow", "c": "frozen"}, "tail": "fast"}
    return optax.partition({"fast": fast, "slow": slow, "frozen": frozen}, lambda params: labels)


after_a_step = functools.partial(test_diagnose.after_a_step, params=PARAMS)


def ratios_of(optimizer, params=PARAMS):
    return lb.trust_ratios(optimizer, after_a_step(optimizer, params=params), params)


def without(*names):
    return {name: ratio for name, ratio in EXPECTED.items() if name not in names}


def in_wrappers(inner):
    accumulated = lb.accumulate_gradients(inner, every=1)
    skipping = lb.skip_bad_steps(accumulated, deviations=6)
    return lb.master_weights(lb.dynamic_loss_scale(skipping, initial_scale=1.0))


LAMB, FROZEN = lamb(), optax.set_to_zero()
INJECTED = optax.inject_hyperparams(lb.lamb, static_args=("stacked",))
RATIOS = lb.scale_by_trust_ratio(stacked=STACKED)
MATRICES = optax.masked(LAMB, lambda params: jax.tree.map(lambda x: x.ndim > 1, params))
ACCUMULATED = optax.MultiSteps(LAMB, 1)
OF_KERNELS = lb.muon(0.1, others=LAMB, matrix_mask=lb.matching("rest/b"), stacked=STACKED)
A_AND_B = without("rest/c", "tail/0")
NESTED = {
    "alone": (LAMB, EXPECTED),
    "chain": (lb.chain(optax.clip_by_global_norm(999.0), LAMB), EXPECTED),
    "chain of optax": (optax.chain(LAMB, optax.scale(1.0)), EXPECTED),
    "partition": (partition(LAMB, lb.lamb(0.1), LAMB), EXPECTED),
    "partition, frozen": (partition(LAMB, LAMB, FROZEN), without("rest/c")),
    "partition, another": (partition(LAMB, optax.adam(0.1), FROZEN), without("rest/b", "rest/c")),
    "masked": (optax.masked(LAMB, only("a", "rest/b")), A_AND_B),
    "masked, chain": (optax.chain(optax.masked(LAMB, only("rest/c")), FROZEN), {"rest/c": 5.0}),
    "masked twice": (optax.masked(MATRICES, only("rest/b", "tail/0")), {"rest/b": 3.0}),
    "in wrappers": (in_wrappers(LAMB), EXPECTED),
    "masked in wrappers": (in_wrappers(optax.masked(LAMB, only("a", "rest/b"))), A_AND_B),
    "in optax's": (optax.apply_if_finite(ACCUMULATED.gradient_transformation(), 3), EXPECTED),
    "MultiSteps": (ACCUMULATED, EXPECTED),
    "stochastic_rounding": (lb.stochastic_rounding(LAMB), EXPECTED),
    "average_weights": (lb.average_weights(LAMB, half_life=2), EXPECTED),
    "inject_hyperparams": (INJECTED(0.1, stacked=STACKED), EXPECTED),
    "a mask without moments that selects all": (optax.masked(RATIOS, only(*EXPECTED)), EXPECTED),
    "a mask without moments": (optax.masked(RATIOS, only("a", "rest/b")), A_AND_B),
    "masked links": (
        optax.chain(optax.masked(RATIOS, only("a")), optax.masked(LAMB, only("rest/b"))),
        A_AND_B,
    ),
    "muon": (OF_KERNELS, without("rest/b")),
}


def assert_ratios(ratios, expected):
    assert sorted(ratios) == sorted(expected)
    for name, ratio in expected.items():
        assert_allclose(ratios[name], ratio, rtol=1e-5, err_msg=name)


SLOW = {"masked", "in optax's", "partition", "chain of optax", "masked in wrappers"}


@pytest.mark.parametrize("name", slow_but(NESTED.keys() - SLOW, NESTED))
def test_trust_ratios_are_those_of_their_parameters(name):
    optimizer, expected = NESTED[name]
    state = after_a_step(optimizer)
    assert_ratios(lb.trust_ratios(optimizer, state, PARAMS), expected)
    assert isinstance(lb.diagnose(optimizer, state, PARAMS), list)


def test_of_shapes_under_jit_and_in_a_train_state():
    state, shapes = after_a_step(LAMB), jax.eval_shape(lambda: PARAMS)
    assert_ratios(lb.trust_ratios(LAMB, state, shapes), EXPECTED)
    compiled = jax.jit(lambda state: lb.trust_ratios(LAMB, state, PARAMS))
    assert_ratios(compiled(state), EXPECTED)
    train = TrainState.create(apply_fn=None, params=PARAMS, tx=LAMB)
    train = train.replace(opt_state=state)
    assert_ratios(lb.trust_ratios(train.tx, train, train.params), EXPECTED)


@pytest.mark.parametrize("name", ["partition", "partition, frozen", "masked in wrappers"])
def test_a_checkpoint_that_is_read_without_a_target_reads_the_same(name, tmp_path):
    optimizer, expected = NESTED[name]
    restored = read_back(after_a_step(optimizer), tmp_path)
    assert isinstance(restored, dict | list)
    assert_ratios(lb.trust_ratios(optimizer, restored, PARAMS), expected)


def test_another_optimizer_is_an_error():
    state = after_a_step(LAMB)
    with pytest.raises(ValueError, match="the trust ratios of 7 blocks, and params have 4"):
        lb.trust_ratios(lb.lamb(0.1, stacked={}), state, PARAMS)
    with pytest.raises(ValueError, match="which has trust ratios at 3; got a tuple with trust rat"):
        lb.trust_ratios(LAMB, after_a_step(lb.lans(0.1, stacked=STACKED)), PARAMS)
    hidden = optax.GradientTransformation(jax.jit(LAMB.init), LAMB.update)
    with pytest.raises(ValueError, match="in place of one whose `init` is compiled"):
        lb.trust_ratios(hidden, after_a_step(hidden), PARAMS)
    assert_ratios(lb.trust_ratios(LAMB, after_a_step(hidden), PARAMS), EXPECTED)


def test_two_parameters_of_one_name():
    params = {"a/b": jnp.ones(2), "a": {"b": jnp.ones(3)}}
    with pytest.raises(ValueError, match="several parameters called 'a/b'"):
        ratios_of(lb.lamb(0.1), params)
    state = after_a_step(lb.lamb(0.1), params=params)
    assert isinstance(lb.diagnose(lb.lamb(0.1), state, params), list)


@pytest.mark.parametrize("read", [lb.trust_ratios, lb.diagnose])
def test_the_optimizer_comes_first(read):
    state = after_a_step(LAMB)
    for wrong in (lambda: read(state, PARAMS, PARAMS), lambda: lb.explain(PARAMS, PARAMS)):
        with pytest.raises(TypeError, match="must be a gradient transformation, and comes first"):
            wrong()
    with pytest.raises(TypeError, match="state must be the state of an optimizer"):
        lb.step_metrics(LAMB, state)


def test_names_stay_apart_where_several_parts_adapt_a_parameter():
    optimizer = optax.chain(LAMB, optax.masked(lb.lans(0.1), only("a")))
    ratios = ratios_of(optimizer)
    names = [name for name in ratios if name.endswith("a")]
    assert len(names) == len(set(names)) == 3
    assert_allclose(ratios["0/a"], EXPECTED["a"], rtol=1e-5)
    assert {"rest/b", "rest/c", "tail/0"} < set(ratios)


def test_the_names_of_two_branches_do_not_depend_on_wrappers():
    plain = ratios_of(lb.lans(0.1))
    wrapped = lb.accumulate_gradients(optax.chain(lb.lans(0.1), optax.scale(1.0)), every=1)
    assert list(ratios_of(wrapped)) == list(plain)
    assert list(plain)[:2] == ["momentum_branch/a", "momentum_branch/rest/b"]


@pytest.mark.parametrize("read", [lb.trust_ratios, lb.diagnose])
def test_copies_of_pmap_and_models_of_vmap(read):
    state = after_a_step(LAMB)
    copies = jax.tree.map(lambda x: jnp.stack([x, x]), (state, PARAMS))
    with pytest.raises(ValueError, match=r"trust_ratios has the shape \(2, 7\), with an axis for"):
        read(LAMB, *copies)


def test_they_map_over_models():
    state = after_a_step(LAMB)
    copies = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), state)
    ratios = jax.vmap(lambda state: lb.trust_ratios(LAMB, state, PARAMS))(copies)
    assert_allclose(ratios["rest/b"], [3.0, 6.0], rtol=1e-5)


def test_of_nnx():
    """Its states keep every array in a box."""
    model, plain = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), lb.lamb(0.1)
    params, optimizer = nnx.state(model, nnx.Param), nnx.Optimizer(model, plain, wrt=nnx.Param)
    optimizer.opt_state = jax.tree.map(lambda x: x + 1, optimizer.opt_state)
    for state in (optimizer.opt_state, optimizer):
        assert_ratios(lb.trust_ratios(plain, state, params), {"bias": 2, "kernel": 2})
        assert isinstance(lb.diagnose(plain, state, params), list)


class Point(NamedTuple):
    x: jax.Array
    y: jax.Array


TWO = jnp.full((2, 2), 2.0), jnp.full((2, 2), 3.0)


@pytest.mark.parametrize("params", [TWO, Point(*TWO), TWO[0]], ids=["tuple", "Point", "array"])
def test_other_containers(params):
    ratios = ratios_of(lb.lamb(0.1), params)
    assert_allclose(list(ratios.values()), [2.0, 3.0][: len(ratios)], rtol=1e-5)
    first = jax.tree.map(lambda x: bool(jnp.max(x) == 2), params)
    masked = ratios_of(optax.masked(lb.lamb(0.1), first), params)
    assert_allclose(list(masked.values()), [2.0], rtol=1e-5)


def noisy(params, optimizer):
    """A state after a step that measured the noise of two examples."""
    examples = jax.tree.map(lambda x: jnp.stack([0 * x, 2 * jnp.ones_like(x)]), params)
    mean = jax.tree.map(jnp.ones_like, params)
    small = lb.small_batches_of_examples(examples, params, mean=mean)
    with jax.numpy_dtype_promotion("standard"):
        state = optimizer.init(params)
        step = jax.jit(lambda state: optimizer.update(mean, state, params, small_batches=small)[1])
        return step(state)


def test_the_noise_scale_in_boxes_and_from_a_checkpoint(tmp_path):
    optimizer = lb.skip_bad_steps(lb.chain(lb.measure_noise_scale(), lb.lamb(0.1)))
    state = noisy(PARAMS, optimizer)
    read = jax.jit(lb.noise_scale)
    expected = read(state)
    for other in (read_back(state, tmp_path), jax.tree.map(nnx.Param, state)):
        assert read(other) == expected
        names = jax.eval_shape(lambda state: lb.layer_noise_scales(state, PARAMS), other)
        assert list(names) == list(EXPECTED)


def test_the_noise_scale_of_copies_is_an_error():
    state = noisy(PARAMS, lb.chain(lb.measure_noise_scale(), lb.lamb(0.1)))
    copies = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    with pytest.raises(ValueError, match=r"noise has the shape \(2, 5\), with an axis for"):
        lb.noise_scale(copies)
