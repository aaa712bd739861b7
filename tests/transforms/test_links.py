"""Each link by itself, in `optax.chain`, and in ours."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import optax
import pytest

import optax_largebatch as lb
from tests.helpers import first_step

PARAMS = {
    "dense": {"kernel": jnp.arange(1.0, 7.0).reshape(2, 3), "bias": jnp.zeros(3)},
    "conv": jnp.linspace(-1.0, 1.0, 24).reshape(2, 3, 2, 2),
    "gain": jnp.asarray(2.0),
}
GRADS = jax.tree.map(lambda x: jnp.cos(3 * x) + 0.5, PARAMS)


def steps(transform, count=3, params=PARAMS):
    """The last updates and state after some steps on changing gradients."""
    state, updates = transform.init(params), None
    update = jax.jit(transform.update)
    for index in range(count):
        gradients = jax.tree.map(lambda x, i=index: x * (1 + i), GRADS)
        updates, state = update(gradients, state, params)
    return updates, state


FALLING = optax.linear_schedule(1.0, 0.0, 4)
EQUAL_TO_OPTAX = {
    "scale_by_trust_ratio": (
        lb.scale_by_trust_ratio(0.0, 0.5, 1e-3),
        optax.scale_by_trust_ratio(0.0, 0.5, 1e-3),
    ),
    "norms of at least": (lb.scale_by_trust_ratio(2.0), optax.scale_by_trust_ratio(2.0)),
    "both norms below it": (lb.scale_by_trust_ratio(50.0), optax.scale_by_trust_ratio(50.0)),
    "scheduled decay": (
        lb.add_decayed_weights(FALLING),
        optax.inject_hyperparams(optax.add_decayed_weights)(FALLING),
    ),
    "scheduled rate": (lb.scale_by_learning_rate(FALLING), optax.scale_by_learning_rate(FALLING)),
    "averaged momentum": (
        lb.accumulate_momentum(0.7, averaging=True),
        optax.ema(0.7, debias=False),
    ),
    "clip_by_value": (lb.clip_by_value(0.3), optax.clip(0.3)),
    "clip_by_global_norm": (lb.clip_by_global_norm(0.3), optax.clip_by_global_norm(0.3)),
    "a bound out of reach": (lb.clip_by_global_norm(1e6), optax.identity()),
    "no bound": (lb.clip_by_global_norm(None), optax.identity()),
    "centralize_gradients": (lb.centralize_gradients(), optax.centralize()),
}


@pytest.mark.parametrize("name", EQUAL_TO_OPTAX)
def test_equals_optax(name):
    ours, theirs = EQUAL_TO_OPTAX[name]
    with jax.numpy_dtype_promotion("standard"):
        expected, _ = steps(theirs)
    chex.assert_trees_all_close(steps(ours)[0], expected, rtol=2e-5, atol=1e-6)


def recursive_lamb():
    """Links of every kind: elementwise, with block norms, with a global norm, and nested."""
    return [
        lb.clip_by_global_norm(0.5),
        lb.centralize_gradients(lb.at_least_ndim(2)),
        lb.normalize_by_block_norm(),
        lb.nesterov_split(lb.chain(lb.add_decayed_weights(0.1), lb.scale_by_trust_ratio())),
        lb.accumulate_momentum(0.5),
        lb.scale_by_trust_ratio(trust_ratio_mask=lb.matching("kernel")),
        lb.clip_by_global_norm(0.25),
        lb.scale_by_learning_rate(0.1),
    ]


def test_chain_is_its_links_one_after_the_other():
    ours, state = steps(lb.chain(*recursive_lamb()))
    theirs, their_state = steps(optax.chain(*recursive_lamb()))
    chex.assert_trees_all_close(ours, theirs, rtol=1e-6)
    chex.assert_trees_all_close(state, their_state, rtol=1e-5, atol=1e-7)
    nested = lb.chain(lb.chain(*recursive_lamb()[:3]), lb.chain(*recursive_lamb()[3:]))
    chex.assert_trees_all_close(steps(nested)[0], theirs, rtol=1e-6)


@pytest.mark.parametrize(
    "position", [pytest.param(p, marks=() if p == 4 else pytest.mark.slow) for p in range(9)]
)
def test_foreign_transformation_anywhere_in_a_chain(position):
    links = recursive_lamb()
    links.insert(position, optax.scale(0.5))
    links.insert(position, optax.trace(0.25))
    ours, state = steps(lb.chain(*links))
    theirs, their_state = steps(optax.chain(*links))
    chex.assert_trees_all_close(ours, theirs, rtol=1e-6)
    chex.assert_trees_all_equal_structs(state, their_state)


class TestAdam:
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_storage_dtypes(self, dtype):
        updates, state = steps(lb.scale_by_adam(mu_dtype=dtype))
        halves = optax.tree.cast(PARAMS, dtype)
        chex.assert_trees_all_equal_dtypes((state.mu, state.nu), (halves, PARAMS))
        expected, _ = steps(lb.scale_by_adam())
        chex.assert_trees_all_close(updates, expected, rtol=2e-2)

    def test_direction_is_that_of_the_stored_moments(self):
        transform = lb.scale_by_adam(bias_correction="none", mu_dtype="bfloat16", eps=1e-3)
        updates, state = steps(transform)
        expected = jax.tree.map(
            lambda mu, nu: mu.astype("float32") / (jnp.sqrt(nu) + 1e-3), state.mu, state.nu
        )
        chex.assert_trees_all_close(updates, expected, rtol=1e-6)


class TestTrustRatio:
    @staticmethod
    def ratios(**settings):
        params = {
            "big": jnp.array([30.0, 40.0]),
            "small": jnp.array([0.3, 0.4]),
            "zero": jnp.zeros(2),
        }
        updates = jax.tree.map(lambda x: jnp.array([0.0, 2.0]), params)
        transform = lb.scale_by_trust_ratio(**settings)
        scaled, state = first_step(transform, updates, params)
        assert_allclose(
            state.trust_ratios, [scaled[name][1] / 2 for name in sorted(params)], rtol=1e-6
        )
        return {name: float(scaled[name][1]) / 2 for name in params}

    @pytest.mark.parametrize(
        ("settings", "big", "small", "zero"),
        [
            ({"trust_coefficient": 0.1, "zero_ratio": "coefficient"}, 2.5, 0.025, 0.1),
            ({"param_norm_bounds": (None, 10.0)}, 5.0, 0.25, 1.0),
            ({"param_norm_bounds": (4.0, None)}, 25.0, 2.0, 2.0),
            ({"param_norm_bounds": (4.0, 10.0)}, 5.0, 2.0, 2.0),
            ({"trust_ratio_bounds": (None, 1.0)}, 1.0, 0.25, 1.0),
            ({"trust_ratio_bounds": (2.0, 10.0)}, 10.0, 2.0, 1.0),
            ({"trust_ratio_mask": lb.matching("small")}, 1.0, 0.25, 1.0),
        ],
    )
    def test_settings(self, settings, big, small, zero):
        expected = {"big": big, "small": small, "zero": zero}
        chex.assert_trees_all_close(self.ratios(**settings), expected, rtol=1e-6)


class TestLars:
    W, G = jnp.array([3.0, 4.0]), jnp.array([0.0, 2.0])  # norms 5 and 2

    def ratio(self, g=G, **settings):
        transform = lb.scale_by_lars(0.1, trust_coefficient=0.5, **settings)
        updates, state = first_step(transform, g, self.W)
        return updates, float(state.trust_ratios[0])

    @pytest.mark.parametrize(
        ("settings", "expected"),
        [
            ({"trust_ratio_bounds": (None, 0.25)}, 0.25),
            ({"larc_learning_rate": 4.0}, 0.25),
            ({"larc_learning_rate": 0.5}, 1.0),
            ({"larc_learning_rate": 0.0}, 1.0),
        ],
    )
    def test_settings(self, settings, expected):
        updates, ratio = self.ratio(**settings)
        assert_allclose(ratio, expected, rtol=1e-6)
        assert_allclose(updates, ratio * (self.G + 0.1 * self.W), rtol=1e-6)

    @pytest.mark.parametrize(
        ("zero_ratio", "ratio", "update"),
        [
            ("one", 1.0, 0.1 * W),
            ("coefficient", 0.5, 0.05 * W),
            ("gradient", 1.0, 0.0 * W),
            ("formula", 0.5 * 5 / (0.5 + 1e-3), 0.5 * 5 / (0.5 + 1e-3) * 0.1 * W),
        ],
    )
    def test_zero_gradient(self, zero_ratio, ratio, update):
        updates, own = self.ratio(g=jnp.zeros(2), zero_ratio=zero_ratio, eps=1e-3)
        assert_allclose(own, ratio, rtol=1e-6)
        assert_allclose(updates, update, rtol=1e-6)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_centralization_along_an_axis(axis):
    updates, _ = steps(lb.centralize_gradients(output_axis=axis), count=1)
    others = tuple(a for a in range(4) if a != axis % 4)
    assert_allclose(np.mean(updates["conv"], axis=others), 0.0, atol=1e-6)
    assert_array_equal(updates["dense"]["bias"], GRADS["dense"]["bias"])


def test_gradients_that_are_none_leave_their_leaf_alone():
    """And the ratios of its layers."""
    transform = lb.chain(lb.scale_by_adam(), lb.scale_by_trust_ratio(stacked={"b": 0}))
    params = {"a": jnp.ones(2), "b": jnp.arange(1.0, 7.0).reshape(3, 2)}
    state = transform.init(params)
    state = transform.update(jax.tree.map(jnp.cos, params), state, params)[1]
    updates, after = transform.update({"a": jnp.ones(2), "b": None}, state, params)
    assert updates["b"] is None
    assert len(set(after[1].trust_ratios.tolist())) == 4
    assert_array_equal(after[0].mu["b"], state[0].mu["b"])
    assert_array_equal(after[1].trust_ratios[1:], state[1].trust_ratios[1:])
    assert bool(jnp.any(after[0].mu["a"] != state[0].mu["a"]))
