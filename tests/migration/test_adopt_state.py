"""Another optimizer in the middle of a run, as if it had been there from the start."""

import chex
from flax import nnx
from flax.training.train_state import TrainState
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_largebatch as lb
from tests.migration.switches import (
    DOES_NOT_SAY,
    PARAMS,
    SCHEDULE,
    SWITCHES,
    gradients,
    state_after,
    sums_gradients,
    without_bias,
)

QUICK = (
    "adamw to lamb",
    "lars to lars",
    "MultiSteps of adamw to accumulated lamb",
    "hidden to hidden",
    "several adams to lamb",
    "contrib.muon to muon",
    "muon to contrib.muon",
    "adamw to muonh",
    "adamh to lamb",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in SWITCHES],
)
def test_the_next_steps_are_those_of_one_that_was_there_from_the_start(name):
    """That one is given the same gradients and parameters, and its own updates are thrown away.

    Macro-batches have three parts, so that the change is made between the first and the second.
    """
    before = 3
    old, new = SWITCHES[name]
    params, state, expected_state = PARAMS, old.init(PARAMS), new.init(PARAMS)
    given = gradients(before + 4)
    for gradient in given[:before]:
        _, expected_state = new.update(gradient, expected_state, params)
        updates, state = old.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    step = before if name in DOES_NOT_SAY else None
    compared = old if sums_gradients(state) else None
    adopted = lb.adopt_state(new, params, state, step=step, old_optimizer=compared)
    chex.assert_trees_all_equal_shapes_and_dtypes(adopted, expected_state)
    expected = params
    for gradient in given[before:]:
        updates, adopted = new.update(gradient, adopted, params)
        params = optax.apply_updates(params, updates)
        updates, expected_state = new.update(gradient, expected_state, expected)
        expected = optax.apply_updates(expected, updates)
        chex.assert_trees_all_close(params, expected, rtol=1e-5, atol=1e-5)
    assert not np.allclose(params["kernel"], PARAMS["kernel"])


def test_no_two_numbers_share_an_array():
    """So that the state can be donated."""
    old = optax.adamw(SCHEDULE)
    state = jax.tree.map(jnp.copy, old.init(PARAMS))
    adopted = lb.adopt_state(lb.lamb(SCHEDULE), PARAMS, state)
    step = jax.jit(lb.lamb(SCHEDULE).update, donate_argnums=1)
    step(PARAMS, adopted, PARAMS)


def test_moments_take_the_dtype_of_the_new_state():
    params = jax.tree.map(lambda x: x.astype("bfloat16"), PARAMS)
    old, new = optax.adamw(0.1), lb.lamb(0.1, nu_dtype="bfloat16")
    _, state = old.update(params, old.init(params), params)
    (adam,) = (part for part in lb.adopt_state(new, params, state) if hasattr(part, "mu"))
    assert {x.dtype for x in jax.tree.leaves(adam.mu)} == {jnp.dtype("float32")}
    assert {x.dtype for x in jax.tree.leaves(adam.nu)} == {jnp.dtype("bfloat16")}
    assert all(jnp.all(x != 0) for x in jax.tree.leaves(adam.mu))


REFUSED = {
    "moments where there were none": (
        optax.sgd(SCHEDULE),
        lb.lamb(0.1),
        "state has no moments, and optimizer has moments of Adam",
    ),
    "no moments where there were some": (
        optax.adamw(SCHEDULE),
        optax.sgd(SCHEDULE),
        "state has moments of Adam, and optimizer has no moments",
    ),
    "a buffer for moments": (
        optax.sgd(SCHEDULE, 0.9),
        lb.lamb(0.1),
        "state has a momentum buffer of 'bias', and optimizer needs moments of Adam",
    ),
    "moments for a buffer": (
        optax.adamw(SCHEDULE),
        lb.lars(0.1),
        "state has moments of Adam of 'bias', and optimizer needs a momentum buffer",
    ),
    "no micro-batches": (
        optax.lars(SCHEDULE),
        lb.lbsgd(0.1, momentum=0.9),
        "optimizer has a ScaleByWarmedUpRateState, whose numbers",
    ),
    "moments of normalised gradients": (
        optax.adamw(SCHEDULE),
        lb.lans(0.1),
        "optimizer has a NesterovSplitState, whose numbers",
    ),
    "moments of another kind": (
        optax.adabelief(0.1),
        lb.lamb(0.1),
        "state has no moments, and optimizer has moments of Adam",
    ),
    "two moments of one parameter": (
        optax.chain(optax.adam(0.1), optax.adam(0.1)),
        lb.lamb(0.1),
        "state must hold the moments of 'bias' once",
    ),
    "places for two moments of one parameter": (
        optax.adam(0.1),
        lb.chain(lb.scale_by_adam(), lb.scale_by_adam()),
        "optimizer must hold the moments of 'bias' once",
    ),
    "hidden parameters": (
        optax.masked(optax.adam(0.1), {"kernel": True, "bias": False}),
        lb.lamb(0.1),
        "state has no moments of 'bias': .* hide it there too, .* begin with optimizer.init",
    ),
    "moments of normalised gradients, to plain ones": (
        lb.lans(0.1),
        lb.lamb(0.1),
        "state has a NesterovSplitState",
    ),
    "moments beside no count": (
        optax.rmsprop(SCHEDULE),
        optax.rmsprop(0.1),
        "optimizer has a ScaleByRmsState, whose numbers",
    ),
    "no count": (optax.lars(0.1), lb.lars(0.1), "step must be given.* has counted none"),
    "two counts": (
        optax.chain(optax.adam(0.1), optax.scale_by_schedule(SCHEDULE)),
        lb.lamb(0.1),
        r"step must be given.* has counted \[1, 2\]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_wrong_is_refused(name):
    old, new, says = REFUSED[name]
    state = state_after(old)
    if name == "two counts":
        state = (state[0], state[1]._replace(count=state[1].count - 1))
    compared = old if "micro-batches" in name else None
    with pytest.raises(ValueError, match=says):
        lb.adopt_state(new, PARAMS, state, old_optimizer=compared)


def test_other_parameters_are_refused():
    state = optax.adamw(0.1).init({"kernel": jnp.ones((8, 2, 3)), "bias": jnp.ones((8, 3))})
    with pytest.raises(ValueError, match=r"'bias' has \(3,\) and its moments have \(8, 3\)"):
        lb.adopt_state(lb.lamb(0.1), PARAMS, state)
    with pytest.raises(TypeError, match="step must be a Python integer"):
        lb.adopt_state(lb.lamb(0.1), PARAMS, state, step=1.0)


@pytest.mark.parametrize("of_params", [False, True], ids=["state alone", "params too"])
def test_a_state_of_pmap_is_refused(of_params):
    def copies(tree):
        return jax.tree.map(lambda x: jnp.stack([x] * 8), tree)

    state, params = copies(state_after(optax.adamw(0.1))), copies(PARAMS)
    for step in (None, 2):
        with pytest.raises(ValueError, match=r"state must be that .* \(8,\).* pass one, as in"):
            lb.adopt_state(lb.lamb(0.1), params if of_params else PARAMS, state, step=step)


def test_inside_of_jit_and_vmap_the_step_must_be_given():
    state = state_after(optax.adamw(0.1))
    new = lb.lamb(SCHEDULE)
    with pytest.raises(ValueError, match=r"step must be given inside jax.jit"):
        jax.jit(lambda state: lb.adopt_state(new, PARAMS, state))(state)
    with pytest.raises(ValueError, match=r"old_optimizer cannot be given inside jax.jit"):
        jax.jit(
            lambda state: lb.adopt_state(new, PARAMS, state, step=2, old_optimizer=optax.adamw(0.1))
        )(state)
    compiled = jax.jit(lambda state: lb.adopt_state(new, PARAMS, state, step=2))(state)
    chex.assert_trees_all_equal(compiled, lb.adopt_state(new, PARAMS, state))
    params, states = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), (PARAMS, state))
    models = jax.vmap(lambda *of: lb.adopt_state(new, *of, step=2))(params, states)
    chex.assert_trees_all_equal(jax.tree.map(lambda x: x[0], models), compiled)


AS_PURE = getattr(nnx, "as_pure", None) or nnx.pure
"""Its name in older versions of Flax is pure."""


def nnx_optimizer(model, optimizer):
    return nnx.Optimizer(model, optimizer, wrt=nnx.Param)


def test_arguments_of_another_kind_are_refused():
    adamw, new = optax.adamw(0.1), lb.lamb(0.1)
    state = state_after(adamw)
    whole = TrainState.create(apply_fn=None, params=PARAMS, tx=adamw)
    with pytest.raises(TypeError, match="optimizer must be a gradient transformation, got <func"):
        lb.adopt_state(lb.lamb, PARAMS, state)
    with pytest.raises(TypeError, match="old_optimizer must be a gradient transformation"):
        lb.adopt_state(new, PARAMS, state, old_optimizer=optax.adamw)
    with pytest.raises(TypeError, match=r"got a TrainState\. .* has it as its opt_state"):
        lb.adopt_state(new, PARAMS, whole)
    with pytest.raises(TypeError, match="params must hold floating point arrays; '0/count'"):
        lb.adopt_state(new, state, PARAMS)


@pytest.mark.parametrize("boxed", [False, True], ids=["pure", "in boxes"])
def test_in_nnx(boxed):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    before = nnx_optimizer(model, optax.adamw(0.1))
    before.update(model, nnx.state(model, nnx.Param))
    params, state = AS_PURE(nnx.state(model, nnx.Param)), AS_PURE(before.opt_state)
    if boxed:
        old = before.opt_state
        chex.assert_trees_all_equal(
            lb.adopt_state(lb.lamb(0.1), params, old), lb.adopt_state(lb.lamb(0.1), params, state)
        )
    after = nnx_optimizer(model, lb.lamb(0.1))
    nnx.update(after.opt_state, nnx.state(lb.adopt_state(after.tx, params, state)))
    adam = AS_PURE(after.opt_state)[2]
    chex.assert_trees_all_equal(adam.mu, state[0].mu)
    assert int(adam.count) == 1
    after.update(model, nnx.state(model, nnx.Param))
    assert int(AS_PURE(after.opt_state)[2].count) == 2


def test_moments_of_a_parameter_that_is_frozen_now_are_dropped():
    state = state_after(optax.adamw(0.1))
    adopted = lb.adopt_state(without_bias(lb.lamb(0.1)), PARAMS, state)
    assert isinstance(optax.tree.get(adopted, "mu")["bias"], optax.MaskedNode)
    np.testing.assert_array_equal(optax.tree.get(adopted, "mu")["kernel"], state[0].mu["kernel"])
