"""Trust ratios by name, sentences about a run, and what an optimizer will do with what."""

import inspect
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
    return jax.jit(optimizer.update)(gradients, optimizer.init(params), params)[1]


def test_trust_ratios_by_name_and_layer():
    """With gradients of one, Adam's direction is one: the ratio is the mean square's root."""
    state = after_a_step(lb.lamb(0.1, stacked=STACKED))
    ratios = lb.trust_ratios(state, PARAMS, stacked=STACKED)
    assert list(ratios) == ["head/bias", "head/kernel", "layers/bias", "layers/kernel"]
    np.testing.assert_allclose(ratios["head/kernel"], 2.0, rtol=1e-5)
    np.testing.assert_allclose(ratios["layers/kernel"], [1.0, 9.0], rtol=1e-5)


def test_trust_ratios_of_two_directions_and_inside_wrappers():
    optimizer = lb.skip_nonfinite(lb.accumulate_gradients(lb.lans(0.1), every=1))
    ratios = lb.trust_ratios(after_a_step(optimizer), PARAMS)
    assert len(ratios) == 2 * 4
    names = [name for name in ratios if name.endswith("head/kernel")]
    assert [name.split("/")[-3] for name in names] == ["momentum_branch", "gradient_branch"]


def test_trust_ratios_under_jit():
    state = after_a_step(lb.lars(0.1))
    ratios = jax.jit(lambda state: lb.trust_ratios(state, PARAMS))(state)
    np.testing.assert_array_equal(
        jnp.stack(list(ratios.values())), optax.tree.get(state, "trust_ratios")
    )


def test_other_states_and_parameters_are_errors():
    with pytest.raises(ValueError, match="state holds no trust ratios"):
        lb.trust_ratios(after_a_step(lb.eve(0.1)), PARAMS)
    with pytest.raises(ValueError, match="holds the trust ratios of 6 blocks, and params have 4"):
        lb.trust_ratios(after_a_step(lb.lamb(0.1, stacked=STACKED)), PARAMS)


def sentences(optimizer, params=PARAMS, gradients=None, **settings):
    return lb.diagnose(after_a_step(optimizer, params, gradients), params, **settings)


def test_nothing_to_say():
    mask = lb.at_least_ndim(2)
    assert (
        sentences(
            lb.lamb(0.1, trust_ratio_mask=mask, stacked=STACKED),
            weight_decay_mask=mask,
            stacked=STACKED,
        )
        == []
    )


def test_adapted_biases():
    (sentence,) = sentences(lb.lamb(0.1, stacked=STACKED), stacked=STACKED)
    # The biases of the layers are 1, and so are their ratios: as if they were not adapted.
    assert sentence.startswith("1 of 2 parameters with a single axis are adapted, such as 'head/b")
    assert "trust_ratio_mask=excluding_kinds('bias', 'norm')" in sentence


MATRICES = {f"kernel_{index}": jnp.full((2, 2), 1.5 + index / 10) for index in range(5)}


def test_ratios_at_a_bound():
    """Without the optimizer, several parameters at the largest ratio may be at a bound."""
    (sentence,) = sentences(lb.lamb(0.1, trust_ratio_bounds=(None, 1.65)), MATRICES)
    assert sentence.startswith("3 of 5 trust ratios are 1.65, the largest of all, though the sizes")
    assert "If that is a bound" in sentence


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
    (found,) = sentences(lb.lamb(0.1, trust_ratio_mask=lb.excluding("bias")), params)
    assert found.startswith("1 of 6 parameters are not finite, or their norm overflows, such as 'b")


def test_stacks_that_nobody_declared():
    (found,) = sentences(lb.lamb(0.1, trust_ratio_mask=lb.at_least_ndim(3)))
    assert found.startswith("1 of 4 parameters look like stacks of layers and have one trust ratio")
    assert "such as 'layers/kernel' of shape (2, 4, 4)" in found
    assert "stacked=stacked_layers({'layers/': 0})" in found
    # The biases are not adapted, so it does no harm that they are one block.
    kernels = lb.stacked_layers({"layers/kernel": 0})
    mask = lb.at_least_ndim(2) & lb.excluding("bias")
    assert sentences(lb.lamb(0.1, trust_ratio_mask=mask, stacked=kernels), stacked=kernels) == []


def test_a_mask_that_decays_nothing():
    mask = lb.at_least_ndim(5)
    (sentence,) = sentences(lb.lamb(0.1), MATRICES, weight_decay_mask=mask)
    assert sentence.startswith("weight_decay_mask leaves out every parameter")


def test_steps_that_were_left_out():
    optimizer = lb.skip_nonfinite(lb.lamb(0.1))
    gradients = jax.tree.map(lambda x: x * jnp.inf, MATRICES)
    state = after_a_step(optimizer, MATRICES, gradients)
    (sentence,) = lb.diagnose(state, MATRICES)
    assert sentence.startswith("1 steps were left out")


ADAPTING = {"lamb": {}, "lans": {}, "lars": {}, "larc": {"clip": False}}


@pytest.mark.parametrize("factor", [1e6, 1e-6])
@pytest.mark.parametrize("name", ADAPTING)
def test_it_advises_what_the_optimizer_has(name, factor):
    """A bound from above is no cure for a ratio that is too small."""
    make = getattr(lb, name)
    arguments = inspect.signature(make).parameters
    params = MATRICES | {"far": jnp.full((2, 2), factor)}
    found = " ".join(sentences(make(0.1, **ADAPTING[name]), params))
    assert ("far above" in found) == (factor > 1)
    assert ("far below" in found) == (factor < 1)
    wanted = "trust_ratio_bounds" if factor > 1 else "param_norm_bounds"
    advised = set(re.findall(r"\w+_bounds", found))
    assert advised <= {wanted} & set(arguments)
    if name in ("lamb", "lans"):  # the states of lars, larc and lbsgd do not tell which one it is
        assert advised == {wanted} & set(arguments)
    assert wanted in found or "leave it out with trust_ratio_mask" in found


def test_nothing_layer_wise():
    for name in ("eve", "scaled_adam"):
        first, *_ = sentences(getattr(lb, name)(0.1))
        assert first.startswith("There is nothing layer-wise here")
    first, second = lb.diagnose(
        optax.tree.set(lb.skip_nonfinite(lb.eve(0.1)).init(MATRICES), skipped=jnp.int32(3)),
        MATRICES,
    )
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
    left_out, fell = lb.diagnose(state, MATRICES)
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
    adapted, zero = sentences(optimizer, params)
    assert adapted.startswith("1 of 1 parameters with a single axis are adapted, such as 'bias'")
    assert zero.startswith("1 of 7 parameters are zero, such as 'new'")


def test_explain():
    explanation = lb.explain(
        jax.eval_shape(lambda: PARAMS),
        weight_decay_mask=lb.at_least_ndim(2),
        trust_ratio_mask=lb.matching("head"),
        groups=lb.param_groups({"params": lb.matching("bias"), "learning_rate": 0.1}),
        stacked=STACKED,
    )
    lines = {one.name: one for one in explanation.parameters}
    assert [one.decayed for one in lines.values()] == [False, True, False, True]
    assert [one.adapted for one in lines.values()] == [True, True, False, False]
    assert [one.blocks for one in lines.values()] == [1, 1, 2, 2]
    assert lines["layers/bias"].group == "matching('bias')"
    assert not lines["layers/kernel"].group
    assert str(explanation).splitlines()[-1] == (
        "4 parameters, 6 blocks, 55 numbers: 44 decayed, 15 adapted"
    )
    assert not any(one.undeclared for one in explanation.parameters)
    with pytest.raises(ValueError, match="'attention' matches no parameter"):
        lb.explain(PARAMS, weight_decay_mask=lb.matching("attention"))


def test_explain_marks_stacks_that_nobody_declared():
    *_, count, first, second = str(lb.explain(PARAMS)).splitlines()
    assert count.startswith("4 parameters, 4 blocks")
    assert first.startswith("?: 2 parameters look like stacks of layers")
    assert second == "   stacked=stacked_layers({'layers/': 0})"
    explanation = lb.explain(PARAMS, stacked=lb.stacked_layers({"layers/kernel": 0}))
    marked = {one.name: one.undeclared for one in explanation.parameters if one.undeclared}
    assert marked == {"layers/bias": "'^layers/bias$': 0"}
    lines = [line.split() for line in str(explanation).splitlines()]
    assert [line[2] for line in lines[1:5]] == ["1", "1", "1?", "2"]


def test_explains_what_a_hyperball_would_catch():
    params = {
        "dense": {"bias": jnp.zeros(4), "kernel": jnp.ones((4, 4))},
        "embed": jnp.ones((8, 4)),
        "layers": {"gain": jnp.ones((3, 4)), "kernel": jnp.ones((3, 4, 4))},
        "low": jnp.ones((4, 4), "bfloat16"),
    }
    stacked = lb.stacked_layers({"layers/": 0})
    asked = {"hyperball": True, "stacked": stacked}
    reasons = {one.name: one.caught for one in lb.explain(params, **asked).parameters}
    assert {name: reason.split(":")[0] for name, reason in reasons.items() if reason} == {
        "dense/bias": "starts at zero, and would stay there",
        "embed": "is an embedding",
        "layers/gain": "has one axis",
        "low": "is bfloat16",
    }
    printed = str(lb.explain(params, **asked))
    assert re.search(r"dense/bias +4 +1 +yes +yes! ", printed)
    assert "!: starts at zero, and would stay there: dense/bias" in printed
    mask = lb.at_least_ndim(2) & lb.excluding("embed", "low")
    for shown in (params, jax.eval_shape(lambda: params)):
        assert "!" not in str(lb.explain(shown, trust_ratio_mask=mask, **asked))
    jax.eval_shape(lambda params: lb.explain(params, **asked) and params, params)
    assert "!" not in str(lb.explain(params, stacked=stacked))
