"""Readers of a run find their part of any state, and say which parameters it is about."""

from typing import NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import optax_largebatch as lb

SIZES = {"a": 2.0, "b": 3.0, "c": 5.0, "d": 7.0}
"""With gradients of one, LAMB's trust ratio in the first step is the size of the elements."""
PARAMS = {
    "a": jnp.full((4, 2), 2.0),
    "rest": {"b": jnp.full((3, 3), 3.0), "c": jnp.full((4, 2), 5.0)},
    "tail": (jnp.full(6, 7.0),),
}
EXPECTED = {"a": 2.0, "rest/b": 3.0, "rest/c": 5.0, "tail/0": 7.0}
STACKED = lb.stacked_layers({"^a$": 0})


def lamb(**settings):
    return lb.lamb(0.1, **settings)


def only(*names):
    """A mask of the parameters with these names."""

    def mask(params):
        return jax.tree.map_with_path(
            lambda path, _: jax.tree_util.keystr(path, simple=True, separator="/") in names, params
        )

    return mask


def labels(params):
    return {"a": "fast", "rest": {"b": "slow", "c": "frozen"}, "tail": "fast"}


def after_a_step(optimizer, params=PARAMS):
    gradients = jax.tree.map(jnp.ones_like, params)
    with jax.numpy_dtype_promotion("standard"):
        state = optimizer.init(params)
        return jax.jit(optimizer.update)(gradients, state, params)[1]


def ratios_of(optimizer, params=PARAMS):
    return lb.trust_ratios(optimizer, after_a_step(optimizer, params), params)


def without(*names):
    return {name: ratio for name, ratio in EXPECTED.items() if name not in names}


NESTED = {
    "partition": (
        lambda: optax.partition({"fast": lamb(), "slow": lamb(), "frozen": lamb()}, labels),
        EXPECTED,
    ),
    "partition with frozen parameters": (
        lambda: optax.partition(
            {"fast": lamb(), "slow": lamb(), "frozen": optax.set_to_zero()}, labels
        ),
        without("rest/c"),
    ),
    "partition with another optimizer": (
        lambda: optax.partition(
            {"fast": lamb(), "slow": optax.adam(0.1), "frozen": optax.set_to_zero()}, labels
        ),
        without("rest/b", "rest/c"),
    ),
    "masked": (lambda: optax.masked(lamb(), only("rest/b", "tail/0")), without("a", "rest/c")),
    "masked in a chain": (
        lambda: optax.chain(optax.masked(lamb(), only("a")), optax.scale(1.0)),
        {"a": 2.0},
    ),
    "masked twice": (
        lambda: optax.masked(
            optax.masked(lamb(), lambda params: jax.tree.map(lambda x: x.ndim > 1, params)),
            only("rest/b", "tail/0"),
        ),
        {"rest/b": 3.0},
    ),
    "in wrappers": (
        lambda: lb.master_weights(
            lb.skip_bad_steps(lb.accumulate_gradients(optax.masked(lamb(), only("a")), every=1))
        ),
        {"a": 2.0},
    ),
    "in wrappers of optax": (
        lambda: optax.apply_if_finite(
            optax.MultiSteps(lamb(), 1).gradient_transformation(), max_consecutive_errors=3
        ),
        EXPECTED,
    ),
    "inject_hyperparams": (lambda: optax.inject_hyperparams(lb.lamb)(0.1), EXPECTED),
    "a mask without moments that selects all": (
        lambda: optax.masked(lb.scale_by_trust_ratio(), only(*EXPECTED)),
        {"a": 2.0, "rest/b": 3.0, "rest/c": 5.0, "tail/0": 7.0},
    ),
}


def assert_ratios(ratios, expected):
    assert list(ratios) == list(expected)
    for name, ratio in expected.items():
        np.testing.assert_allclose(ratios[name], ratio, rtol=1e-5, err_msg=name)


SLOW = ("masked", "in wrappers of optax", "inject_hyperparams", "partition")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in NESTED]
)
def test_trust_ratios_are_those_of_their_parameters(name):
    make, expected = NESTED[name]
    assert_ratios(dict(sorted(ratios_of(make()).items())), expected)


@pytest.mark.parametrize("name", ["partition", "partition with frozen parameters", "in wrappers"])
def test_a_checkpoint_that_is_read_without_a_target_reads_the_same(name, tmp_path):
    make, expected = NESTED[name]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", after_a_step(make()))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state")
    assert isinstance(restored, dict | list)
    ratios = lb.trust_ratios(make(), restored, PARAMS)
    assert_ratios(dict(sorted(ratios.items())), expected)


def test_names_stay_apart_where_several_parts_adapt_a_parameter():
    optimizer = optax.chain(lamb(), optax.masked(lb.lans(0.1), only("a")))
    ratios = ratios_of(optimizer)
    names = [name for name in ratios if name.endswith("a")]
    assert len(names) == len(set(names)) == 3
    assert ratios["0/a"] == pytest.approx(2.0, rel=1e-5)
    assert {"rest/b", "rest/c", "tail/0"} < set(ratios)


def test_the_names_of_two_branches_do_not_depend_on_wrappers():
    plain = ratios_of(lb.lans(0.1))
    wrapped = lb.accumulate_gradients(optax.chain(lb.lans(0.1), optax.scale(1.0)), every=1)
    assert list(ratios_of(wrapped)) == list(plain)
    assert list(plain)[:2] == ["momentum_branch/a", "momentum_branch/rest/b"]


def test_links_behind_masks_that_keep_no_moments():
    optimizer = optax.chain(
        optax.masked(lb.scale_by_trust_ratio(), only("a")),
        optax.masked(lamb(), only("rest/b")),
    )
    assert_ratios(ratios_of(optimizer), {"a": 2.0, "rest/b": 3.0})


@pytest.mark.parametrize("read", [lb.trust_ratios, lb.diagnose])
def test_copies_of_pmap_and_models_of_vmap(read):
    state = after_a_step(lamb())
    copies = jax.tree.map(lambda x: jnp.stack([x, x]), (state, PARAMS))
    with pytest.raises(ValueError, match=r"trust_ratios has the shape \(2, 4\), with an axis for"):
        read(lamb(), *copies)


def test_they_map_over_models():
    state = after_a_step(lamb())
    copies = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), state)
    ratios = jax.vmap(lambda state: lb.trust_ratios(lamb(), state, PARAMS))(copies)
    np.testing.assert_allclose(ratios["rest/b"], [3.0, 6.0], rtol=1e-5)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(3, 3, rngs=rngs)
        self.out = nnx.Linear(3, 2, rngs=rngs)


def test_of_nnx():
    """Its states keep every array in a box."""
    model = Model(nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    optimizer = nnx.Optimizer(model, lamb(), wrt=nnx.Param)
    optimizer.opt_state = jax.tree.map(lambda x: x + 1, optimizer.opt_state)
    for state in (optimizer.opt_state, optimizer):
        assert_ratios(
            lb.trust_ratios(lamb(), state, params),
            {"hidden/bias": 2, "hidden/kernel": 2, "out/bias": 2, "out/kernel": 2},
        )
        assert isinstance(lb.diagnose(lamb(), state, params), list)


class Point(NamedTuple):
    x: jax.Array
    y: jax.Array


@pytest.mark.parametrize(
    "params",
    [
        (jnp.full((2, 2), 2.0), jnp.full((2, 2), 3.0)),
        Point(jnp.full((2, 2), 2.0), jnp.full((2, 2), 3.0)),
        jnp.full((2, 2), 2.0),
    ],
    ids=["tuple", "NamedTuple", "array"],
)
def test_other_containers(params):
    ratios = ratios_of(lamb(), params)
    np.testing.assert_allclose(list(ratios.values()), [2.0, 3.0][: len(ratios)], rtol=1e-5)
    first = jax.tree.map(lambda x: bool(jnp.max(x) == 2), params)
    masked = ratios_of(optax.masked(lamb(), first), params)
    np.testing.assert_allclose(list(masked.values()), [2.0], rtol=1e-5)


def test_an_optimizer_of_a_part_of_the_parameters():
    """As with `wrt=` of `nnx.Optimizer`: readers are given that part."""
    part = {"rest": PARAMS["rest"]}
    assert_ratios(ratios_of(lamb(), part), {"rest/b": 3.0, "rest/c": 5.0})
    with pytest.raises(ValueError, match="the trust ratios of 2 blocks, and params have 4"):
        lb.trust_ratios(lamb(), after_a_step(lamb(), part), PARAMS)


def test_stacks_behind_a_mask():
    optimizer = optax.masked(lamb(stacked=STACKED), only("a", "rest/c"))
    assert_ratios(ratios_of(optimizer), {"a": [2.0] * 4, "rest/c": 5.0})


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
    optimizer = lb.skip_bad_steps(lb.chain(lb.measure_noise_scale(), lamb()))
    state = noisy(PARAMS, optimizer)
    read = jax.jit(lb.noise_scale)
    expected = read(state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state")
    boxed = jax.tree.map(nnx.Param, state)
    for other in (restored, boxed):
        assert read(other) == expected
        names = jax.eval_shape(lambda state: lb.layer_noise_scales(state, PARAMS), other)
        assert list(names) == list(EXPECTED)


def test_the_noise_scale_of_copies_is_an_error():
    state = noisy(PARAMS, lb.chain(lb.measure_noise_scale(), lamb()))
    copies = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    with pytest.raises(ValueError, match=r"noise has the shape \(2, 5\), with an axis for"):
        lb.noise_scale(copies)
