"""Trust ratios by name, and sentences about a run."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_largebatch as lb

STACKED = lb.stacked_layers({"layers/": 0})
SIZES = jnp.array([1.0, 9.0]).reshape(2, 1, 1)
PARAMS = {
    "head": {"bias": jnp.full(3, 0.5), "kernel": jnp.full((4, 3), 2.0)},
    "layers": {
        "bias": jnp.ones((2, 4)),
        "kernel": jnp.ones((2, 4, 4)) * jnp.array([[[1.0]], [[9.0]]]),
    },
}


def after_a_step(optimizer, params=PARAMS, gradients=None):
    gradients = gradients or jax.tree.map(jnp.ones_like, params)
    with jax.numpy_dtype_promotion("standard"):  # for what is optax's
        return jax.jit(optimizer.update)(gradients, optimizer.init(params), params)[1]


def test_trust_ratios_by_name_and_layer():
    """With gradients of one, Adam's direction is one: the ratio is the mean square's root."""
    optimizer = lb.lamb(0.1, stacked=STACKED)
    ratios = lb.trust_ratios(optimizer, after_a_step(optimizer), PARAMS)
    assert list(ratios) == ["head/bias", "head/kernel", "layers/bias", "layers/kernel"]
    np.testing.assert_allclose(ratios["head/kernel"], 2.0, rtol=1e-5)
    np.testing.assert_allclose(ratios["layers/kernel"], [1.0, 9.0], rtol=1e-5)


def test_trust_ratios_of_two_directions_and_inside_wrappers():
    lans = lb.lans(0.1, stacked=STACKED)
    optimizer = lb.skip_bad_steps(lb.accumulate_gradients(lans, every=1))
    ratios = lb.trust_ratios(optimizer, after_a_step(optimizer), PARAMS)
    assert len(ratios) == 2 * 4
    names = [name for name in ratios if name.endswith("head/kernel")]
    assert [name.split("/")[-3] for name in names] == ["momentum_branch", "gradient_branch"]


def test_trust_ratios_under_jit():
    optimizer = lb.lars(0.1, stacked={})
    state = after_a_step(optimizer)
    ratios = jax.jit(lambda state: lb.trust_ratios(optimizer, state, PARAMS))(state)
    np.testing.assert_array_equal(
        jnp.stack(list(ratios.values())), optax.tree.get(state, "trust_ratios")
    )


def sentences(optimizer, params=PARAMS, gradients=None):
    return lb.diagnose(optimizer, after_a_step(optimizer, params, gradients), params)


def test_nothing_to_say():
    mask = lb.at_least_ndim(2)
    assert sentences(lb.lamb(0.1, trust_ratio_mask=mask, stacked=STACKED)) == []


def test_adapted_biases():
    (sentence,) = sentences(lb.lamb(0.1, stacked=STACKED))
    # The biases of the layers are 1, and so are their ratios: as if they were not adapted.
    assert sentence.startswith("1 of 2 parameters with a single axis are adapted, such as 'head/b")
    assert "trust_ratio_mask=~matching_kinds('bias', 'norm')" in sentence


MATRICES = {f"kernel_{index}": jnp.full((2, 2), 1.5 + index / 10) for index in range(5)}


def test_ratios_at_a_bound():
    (sentence,) = sentences(lb.lamb(0.1, trust_ratio_bounds=(None, 1.65)), MATRICES)
    assert sentence.startswith("3 of 5 trust ratios are at an upper bound, 1.65")


def test_ratios_that_exploded():
    params = MATRICES | {"embedding": jnp.full((2, 2), 500.0)}
    (sentence,) = sentences(lb.lamb(0.1), params)
    assert sentence.startswith(
        "1 of 6 parameters have a trust ratio far above the median 1.75: 'emb"
    )


def test_parameters_that_are_zero():
    params = MATRICES | {"new": jnp.zeros((2, 2))}
    (sentence,) = sentences(lb.lamb(0.1), params)
    assert sentence.startswith("1 of 6 parameters are zero, such as 'new'")


def test_ratios_that_are_not_finite():
    params = MATRICES | {"kernel_3": jnp.full((2, 2), jnp.inf)}
    first, *_ = sentences(lb.lars(0.1), params)
    assert first.startswith("1 of 5 parameters have a trust ratio that is not finite or 0, such as")
    assert "'kernel_3' (nan)" in first


@pytest.mark.parametrize("name", ["lamb", "lans", "lars", "larc"])
def test_a_nan_in_one_gradient(name):
    gradients = jax.tree.map(jnp.ones_like, MATRICES)
    gradients["kernel_3"] = gradients["kernel_3"].at[0, 0].set(jnp.nan)
    optimizer = getattr(lb, name)(0.1)
    (found,) = [x for x in sentences(optimizer, MATRICES, gradients) if "not finite" in x]
    assert "kernel_3' (nan)" in found
    metrics = lb.step_metrics(after_a_step(optimizer, MATRICES, gradients))
    assert np.isnan(metrics["trust_ratio/max"])


def test_an_infinite_gradient_has_the_ratio_0():
    gradients = jax.tree.map(jnp.ones_like, MATRICES) | {"kernel_3": jnp.full((2, 2), jnp.inf)}
    first, *_ = sentences(lb.lars(0.1), MATRICES, gradients)
    assert "'kernel_3' (0.0)" in first


def test_weights_that_are_not_finite_and_have_no_ratio():
    params = MATRICES | {"bias": jnp.full(4, jnp.nan)}
    (found,) = sentences(lb.lamb(0.1, trust_ratio_mask=~lb.matching("bias")), params)
    assert found.startswith("1 of 6 parameters are not finite, or their norm overflows, such as 'b")


def test_stacks_that_nobody_declared():
    (found,) = sentences(lb.lamb(0.1, trust_ratio_mask=lb.at_least_ndim(3), stacked={}))
    assert found.startswith("1 of 4 parameters look like stacks of layers that are not declared")
    assert "such as 'layers/kernel' of shape (2, 4, 4): layers with small weights are" in found
    assert "stacked=stacked_layers({'layers/': 0})" in found
    # The biases are not adapted, so it does no harm that they are one block.
    kernels = {"layers/kernel": 0, "layers/bias": None}
    mask = lb.at_least_ndim(2) & ~lb.matching("bias")
    assert sentences(lb.lamb(0.1, trust_ratio_mask=mask, stacked=kernels)) == []


@pytest.mark.parametrize("make", [lb.muon, lb.muonh])
@pytest.mark.parametrize("others", [None, optax.adamw(0.1)], ids=["", "beside optax.adamw"])
def test_stacks_that_nobody_declared_beside_muon(make, others):
    (found,) = sentences(make(0.1, others=others, stacked={}))
    assert found.startswith("2 of 4 parameters look like stacks of layers that are not declared")
    assert "Muon takes a stack of biases for a matrix, and leaves one of matrices to" in found
    assert sentences(make(0.1, others=others, stacked=STACKED)) == []


def test_steps_that_were_left_out():
    optimizer = lb.skip_bad_steps(lb.lamb(0.1))
    gradients = jax.tree.map(lambda x: x * jnp.inf, MATRICES)
    state = after_a_step(optimizer, MATRICES, gradients)
    (sentence,) = lb.diagnose(optimizer, state, MATRICES)
    assert sentence.startswith("1 steps were left out because a gradient was not finite")


def test_spikes_that_were_left_out():
    optimizer = lb.skip_bad_steps(lb.lamb(0.1), deviations=6, window=2, max_in_a_row=1)
    state = optimizer.init(MATRICES)
    for size in (1.0, 1.0, 1e6):
        gradients = jax.tree.map(lambda x, size=size: jnp.full_like(x, size), MATRICES)
        _, state = optimizer.update(gradients, state, MATRICES)
    (sentence,) = lb.diagnose(optimizer, state, MATRICES)
    assert sentence.startswith("1 steps were left out because the norm of the gradient, or the l")
    assert sentence.endswith("gave_up is True.")


ADAPTING = {"lamb": {}, "lans": {}, "lars": {}, "larc": {"clip": False}}


@pytest.mark.parametrize("factor", [1e6, 1e-6])
@pytest.mark.parametrize("name", ADAPTING)
def test_ratios_far_from_the_median(name, factor):
    """Every optimizer has the mask; a bound from above is no cure for a ratio that is too small."""
    params = MATRICES | {"far": jnp.full((2, 2), factor)}
    found = " ".join(sentences(getattr(lb, name)(0.1, **ADAPTING[name]), params))
    assert re.findall("far (above|below) the median", found) == ["above" if factor > 1 else "below"]
    assert "far' (" in found
    assert "leave it out with trust_ratio_mask" in found
    wanted = "trust_ratio_bounds" if factor > 1 else "param_norm_bounds"
    assert re.findall(r"where the optimizer has (\w+)", found) == [wanted]


def test_nothing_layer_wise():
    for name in ("eve", "scaled_adam"):
        first, *_ = sentences(getattr(lb, name)(0.1, stacked=STACKED))
        assert first.startswith("There is nothing layer-wise here")
    optimizer = lb.skip_bad_steps(lb.eve(0.1))
    state = optax.tree.set(optimizer.init(MATRICES), skipped=jnp.int32(3))
    first, second = lb.diagnose(optimizer, state, MATRICES)
    assert first.startswith("There is nothing layer-wise here")
    assert second.startswith("3 steps were left out")


@pytest.mark.parametrize("make", [lb.muonh, lb.adamh])
def test_a_step_that_turns_a_layer_too_far(make):
    assert sentences(make(0.3), MATRICES) == []
    (found,) = sentences(make(4.0), MATRICES)
    assert re.match(r"A layer turned by [123]\.\d radians in the last step", found)


def test_a_loss_scale_that_fell():
    optimizer = lb.dynamic_loss_scale(lb.lamb(0.1))
    assert sentences(optimizer, MATRICES) == []
    state = optax.tree.set(
        optimizer.init(MATRICES), loss_scale=jnp.float32(8), skipped=jnp.int32(13)
    )
    left_out, fell = lb.diagnose(optimizer, state, MATRICES)
    assert left_out.startswith("13 steps were left out")
    assert fell.startswith("The loss scale fell to 8, and 13 steps")


def test_groups_that_do_not_move():
    groups = lb.param_groups({"params": lb.matching("kernel_[01]"), "learning_rate": 0.0})
    (sentence,) = sentences(lb.lamb(0.1, groups=groups), MATRICES)
    assert sentence.startswith("2 of 5 parameters had a learning rate of 0 in the last step, such")
    assert sentences(lb.lamb(0.0), MATRICES) == []  # the end of a schedule


def test_each_part_of_a_partition_is_looked_at():
    params = MATRICES | {"bias": jnp.full(2, 0.5), "new": jnp.zeros((2, 2))}
    optimizer = optax.partition(
        {"lamb": lb.lamb(0.1), "frozen": optax.set_to_zero()},
        {name: "frozen" if name == "new" else "lamb" for name in params},
    )
    (adapted,) = sentences(optimizer, params)  # what is frozen may be zero
    assert adapted.startswith("1 of 1 parameters with a single axis are adapted, such as 'bias'")
