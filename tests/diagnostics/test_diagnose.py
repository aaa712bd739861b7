"""Sentences about a run."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_largebatch as lb

STACKED = lb.stacked_layers({"layers/": 0})
PARAMS = {
    "head": {"bias": jnp.full(3, 0.5), "kernel": jnp.full((4, 3), 2.0)},
    "layers": {
        "bias": jnp.ones((2, 4)),
        "kernel": jnp.ones((2, 4, 4)) * jnp.array([[[1.0]], [[9.0]]]),
    },
}
MATRICES = {f"kernel_{index}": jnp.full((2, 2), 1.5 + index / 10) for index in range(5)}
"""With gradients of one, LAMB's trust ratios in the first step are 1.5, 1.6, ... 1.9."""
SCALES = {f"scale_{index}": jnp.ones(8) for index in range(4)}
ZERO, LARGE = {"new": jnp.zeros((2, 2))}, {"embedding": jnp.full((2, 2), 500.0)}
LAMB, KERNELS = lb.lamb(0.1), lb.at_least_ndim(2)


def after_a_step(optimizer, params=PARAMS, gradients=None):
    """The state, with gradients of one by default."""
    gradients = gradients or jax.tree.map(jnp.ones_like, params)
    with jax.numpy_dtype_promotion("standard"):  # for what is optax's
        return jax.jit(optimizer.update)(gradients, optimizer.init(params), params)[1]


def sentences(optimizer, params=PARAMS, gradients=None):
    return lb.diagnose(optimizer, after_a_step(optimizer, params, gradients), params)


def bounded(low, high):
    return lb.lamb(0.1, trust_ratio_bounds=(low, high))


def frozen(params, *names):
    labels = {name: "frozen" if name in names else "lamb" for name in params}
    return optax.partition({"lamb": LAMB, "frozen": optax.set_to_zero()}, labels)


GROUPS = lb.param_groups({"params": lb.matching("kernel_[01]"), "learning_rate": 0.0})
BEHIND = optax.chain(optax.scale(1.0), lb.scale_by_lars(trust_ratio_bounds=(None, 1e-3)))
WITH_BIAS = MATRICES | {"bias": jnp.full(2, 0.5)}
FOUND = [
    # The biases of the layers are 1, and so are their ratios: as if they were not adapted.
    (lb.lamb(0.1, stacked=STACKED), PARAMS, "1 of 2 parameters with a single axis are adapted, suc"
     r"h as 'head/bias' .* trust_ratio_mask=~matching_kinds\('bias', 'norm'\)"),
    # What is frozen may be zero.
    (frozen(WITH_BIAS | ZERO, "new"), WITH_BIAS | ZERO, "1 of 1 parameters with a .* as 'bias'"),
    (bounded(None, 1.65), MATRICES, "3 of 5 trust ratios are at an upper bound, 1.65"),
    (bounded(None, 1.85), MATRICES, "1 of 5 trust ratios are at an upper bound, 1.85"),
    (bounded(1.75, None), MATRICES, "3 of 5 trust ratios are at a lower bound, 1.75"),
    (lb.skip_bad_steps(BEHIND), MATRICES, "5 of 5 trust ratios are at an upper bound, 0.001"),
    (LAMB, MATRICES | LARGE, "1 of 6 parameters have a trust ratio far above the median 1.75: 'em"),
    (LAMB, MATRICES | ZERO, "1 of 6 parameters are zero, such as 'new'"),
    (lb.lamb(0.1, trust_ratio_mask=~lb.matching("bias")), MATRICES | {"bias": jnp.full(4, np.nan)},
     "1 of 6 parameters are not finite, or their norm overflows, such as 'bias'"),
    (lb.lamb(0.1, groups=GROUPS), MATRICES, "2 of 5 parameters had a learning rate of 0 in the la"),
    (lb.muonh(4.0), MATRICES, r"A layer turned by [123]\.\d radians in the last step"),
    (lb.adamh(4.0), MATRICES, r"A layer turned by [123]\.\d radians in the last step"),
]  # fmt: skip


@pytest.mark.parametrize(("optimizer", "params", "said"), FOUND)
def test_what_is_found(optimizer, params, said):
    (sentence,) = sentences(optimizer, params)
    assert re.match(said, sentence)


@pytest.mark.parametrize(
    ("optimizer", "params"),
    [
        (lb.lamb(0.1, trust_ratio_mask=KERNELS, stacked=STACKED), PARAMS),
        (bounded(0.1, 100.0), MATRICES),
        (lb.muon(0.1), MATRICES),
        (lb.muonh(0.3), MATRICES),
        (lb.adamh(0.3), MATRICES),
        (lb.dynamic_loss_scale(LAMB), MATRICES),
        (lb.lamb(0.0), MATRICES),  # the end of a schedule
    ],
)
def test_nothing_to_say(optimizer, params):
    assert sentences(optimizer, params) == []


def test_ratios_that_are_not_finite():
    params = MATRICES | {"kernel_3": jnp.full((2, 2), jnp.inf)}
    first, *_ = sentences(lb.lars(0.1), params)
    assert first.startswith("1 of 5 parameters have a trust ratio that is not finite or 0, such as")
    assert "'kernel_3' (nan)" in first
    gradients = jax.tree.map(jnp.ones_like, MATRICES) | {"kernel_3": jnp.full((2, 2), jnp.inf)}
    first, *_ = sentences(lb.lars(0.1), MATRICES, gradients)
    assert "'kernel_3' (0.0)" in first


@pytest.mark.parametrize("make", [lb.lamb, lb.lans, lb.lars, lb.larc])
def test_a_nan_in_one_gradient(make):
    gradients = jax.tree.map(jnp.ones_like, MATRICES)
    gradients["kernel_3"] = gradients["kernel_3"].at[0, 0].set(jnp.nan)
    state = after_a_step(make(0.1), MATRICES, gradients)
    (found,) = [x for x in lb.diagnose(make(0.1), state, MATRICES) if "not finite" in x]
    assert "kernel_3' (nan)" in found
    metrics = lb.step_metrics(state)
    assert all(np.isnan(metrics[f"trust_ratio/{end}"]) for end in ("min", "median", "max"))


def test_stacks_that_nobody_declared():
    (found,) = sentences(lb.lamb(0.1, trust_ratio_mask=lb.at_least_ndim(3), stacked={}))
    assert found.startswith("1 of 4 parameters look like stacks of layers that are not declared")
    assert "such as 'layers/kernel' of shape (2, 4, 4): layers with small weights are" in found
    assert "stacked=stacked_layers({'layers/': 0})" in found
    # The biases are not adapted, so it does no harm that they are one block.
    kernels = {"layers/kernel": 0, "layers/bias": None}
    mask = KERNELS & ~lb.matching("bias")
    assert sentences(lb.lamb(0.1, trust_ratio_mask=mask, stacked=kernels)) == []


@pytest.mark.parametrize("make", [lb.muon, lb.muonh])
@pytest.mark.parametrize("others", [None, optax.adamw(0.1)], ids=["", "beside optax.adamw"])
def test_stacks_that_nobody_declared_beside_muon(make, others):
    unsaid = {"stacked": {}, "matrix_axes": {"layers/kernel": None}}
    (found,) = sentences(make(0.1, others=others, **unsaid))
    assert found.startswith("2 of 4 parameters look like stacks of layers that are not declared")
    assert "Muon takes a stack of biases for a matrix, and leaves one of matrices to" in found
    assert sentences(make(0.1, others=others, stacked=STACKED)) == []


def test_steps_that_were_left_out():
    gradients = jax.tree.map(lambda x: x * jnp.inf, MATRICES)
    (sentence,) = sentences(lb.skip_bad_steps(LAMB), MATRICES, gradients)
    assert sentence.startswith("1 steps were left out because a gradient was not finite")
    optimizer = lb.skip_bad_steps(LAMB, deviations=6, window=2, max_in_a_row=1)
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
    """What is advised is an argument of the optimizer, and a cure for this side."""
    make = getattr(lb, name)
    params = MATRICES | {"far": jnp.full((2, 2), factor)}
    said = " ".join(sentences(make(0.1, **ADAPTING[name]), params))
    assert re.findall("far (above|below) the median", said) == ["above" if factor > 1 else "below"]
    assert "far' (" in said
    cures = ["trust_ratio_mask", "trust_ratio_bounds" if factor > 1 else "param_norm_bounds"]
    arguments = inspect.signature(make).parameters
    assert re.findall(r"\w+_(?:mask|bounds)", said) == [x for x in cures if x in arguments]


@pytest.mark.parametrize("make", [optax.adamw, lb.eve, lb.scaled_adam, lb.lbsgd])
def test_without_layer_wise_steps(make):
    """A baseline in which nothing is wrong has an empty list, too."""
    optimizer = lb.skip_bad_steps(make(0.1))
    state = after_a_step(optimizer, MATRICES)
    assert lb.diagnose(optimizer, state, MATRICES) == []
    (left_out,) = lb.diagnose(optimizer, optax.tree.set(state, skipped=jnp.int32(3)), MATRICES)
    assert left_out.startswith("3 steps were left out")


def test_a_loss_scale_that_fell():
    optimizer = lb.dynamic_loss_scale(LAMB)
    state = optax.tree.set(
        optimizer.init(MATRICES), loss_scale=jnp.float32(8), skipped=jnp.int32(13)
    )
    left_out, fell = lb.diagnose(optimizer, state, MATRICES)
    assert left_out.startswith("13 steps were left out")
    assert fell.startswith("The loss scale fell to 8, and 13 steps")


@pytest.mark.parametrize("make", [lb.lamb, lb.lans], ids=lambda make: make.__name__)
def test_no_bound_is_reported_where_none_is_set(make):
    """The ratios of scales that all begin at 1 are the same after a step, by chance."""
    assert not any("bound" in sentence for sentence in sentences(make(0.01), MATRICES | SCALES))
