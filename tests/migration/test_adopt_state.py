"""Another optimizer in the middle of a run, as if it had been there from the start."""

import itertools
import warnings

import chex
from flax import nnx
from flax.training.train_state import TrainState
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_largebatch as lb
from tests.conftest import slow_but
from tests.migration import switches
from tests.migration.switches import ADAM, ADAMW, CONTRIB, LAMB, MUON, MUONH, PARAMS, SCHEDULE

QUICK = {
    "adamw to lamb", "lars to lars", "MultiSteps of adamw to accumulated lamb", "hidden to hidden",
    "several adams to lamb", "contrib.muon to muon", "muon to contrib.muon", "adamw to muonh",
    "adamh to lamb",
}  # fmt: skip


@pytest.mark.parametrize("name", slow_but(QUICK, switches.SWITCHES))
def test_the_next_steps_are_those_of_one_that_was_there_from_the_start(name):
    """That one is given the same gradients and parameters, and its own updates are thrown away.

    Macro-batches have three parts, so that the change is made between the first and the second.
    """
    before = 3
    old, new = switches.SWITCHES[name]
    params, state, expected_state = PARAMS, old.init(PARAMS), new.init(PARAMS)
    given = switches.gradients(before + 4)
    for gradient in given[:before]:
        _, expected_state = new.update(gradient, expected_state, params)
        updates, state = old.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    step = before if name in switches.DOES_NOT_SAY else None
    compared = old if switches.sums_gradients(state) else None
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


def test_the_old_optimizer_is_tried_in_silence():
    """It was warned about when it was built, and is tried on parameters of its own."""

    def update(updates, state, params=None):
        warnings.warn("once more", stacklevel=2)
        return ADAM.update(updates, state, params)

    old, state = optax.GradientTransformation(ADAM.init, update), ADAM.init(PARAMS)
    lb.adopt_state(ADAMW, PARAMS, state, old_optimizer=old)


def test_no_two_numbers_share_an_array():
    """So that the state can be donated."""
    old = optax.adamw(SCHEDULE)
    state = jax.tree.map(jnp.copy, old.init(PARAMS))
    adopted = lb.adopt_state(lb.lamb(SCHEDULE), PARAMS, state)
    step = jax.jit(lb.lamb(SCHEDULE).update, donate_argnums=1)
    step(PARAMS, adopted, PARAMS)


def test_moments_take_the_dtype_of_the_new_state():
    params = jax.tree.map(lambda x: x.astype("bfloat16"), PARAMS)
    old, new = optax.adamw(0.1), lb.lamb(0.1, mu_dtype="bfloat16")
    _, state = old.update(params, old.init(params), params)
    (adam,) = (part for part in lb.adopt_state(new, params, state) if hasattr(part, "mu"))
    assert {x.dtype for x in jax.tree.leaves(adam.mu)} == {jnp.dtype("bfloat16")}
    assert {x.dtype for x in jax.tree.leaves(adam.nu)} == {jnp.dtype("float32")}
    assert all(jnp.all(x != 0) for x in jax.tree.leaves(adam.mu))


def test_parameters_of_low_precision_become_their_own_masters():
    """And their moments take the precision of masters."""
    params = jax.tree.map(lambda x: (x / 3).astype("bfloat16"), PARAMS)
    _, state = LAMB.update(params, LAMB.init(params), params)
    new = lb.master_weights(LAMB)
    adopted = lb.adopt_state(new, params, state, old_optimizer=LAMB)
    exact = jax.tree.map(lambda x: x.astype("float32"), params)
    chex.assert_trees_all_equal(adopted.master, exact)
    chex.assert_trees_all_equal_shapes_and_dtypes(adopted, new.init(params))
    for name in ("mu", "nu"):
        found, old = (optax.tree.get(x, name) for x in (adopted, state))
        chex.assert_trees_all_equal(found, jax.tree.map(lambda x: x.astype("float32"), old))


SGD, LARS = optax.sgd(SCHEDULE, 0.9), optax.lars(SCHEDULE)
FEW = optax.masked(ADAM, {"kernel": True, "bias": False})
REFUSED = [
    (optax.sgd(SCHEDULE), LAMB, "state has no moments, and optimizer has moments of Adam"),
    (ADAMW, optax.sgd(SCHEDULE), "state has moments of Adam, and optimizer has no moments"),
    (SGD, LAMB, "state has a momentum buffer of 'bias', and optimizer needs moments of Adam"),
    (ADAMW, lb.lars(0.1), "moments of Adam of 'bias', and optimizer needs a momentum buffer"),
    (CONTRIB, lb.lars(0.1), "moments of Adam of 'bias', and optimizer needs a momentum buffer"),
    *((x, y, "a momentum buffer of 'bias'") for x in (SGD, LARS) for y in (MUON, MUONH, CONTRIB)),
    (LARS, lb.lbsgd(0.1, momentum=0.9), "optimizer has a ScaleByWarmedUpRateState, whose numbers"),
    (ADAMW, lb.lans(0.1), "must both have a NesterovSplitState"),
    (lb.lans(0.1), LAMB, "must both have a NesterovSplitState"),
    (optax.adabelief(0.1), LAMB, "state has no moments, and optimizer has moments of Adam"),
    (optax.chain(ADAM, ADAM), LAMB, "state must hold the moments of 'bias' once"),
    (ADAM, lb.chain(*[lb.scale_by_adam()] * 2), "optimizer must hold the moments of 'bias' once"),
    (FEW, LAMB, r"no moments of 'bias': .* hide it there too.* forget=matching\('bias'\)"),
    (optax.rmsprop(SCHEDULE), optax.rmsprop(0.1), "optimizer has a ScaleByRmsState, whose numbers"),
    (optax.lars(0.1), lb.lars(0.1), "step must be given.* has counted none"),
]


@pytest.mark.parametrize(("old", "new", "says"), REFUSED)
def test_what_would_be_wrong_is_refused(old, new, says):
    with pytest.raises(ValueError, match=says):
        lb.adopt_state(new, PARAMS, switches.state_after(old))


def test_two_counts_are_refused():
    adam, count = switches.state_after(
        optax.chain(optax.adam(0.1), optax.scale_by_schedule(SCHEDULE))
    )
    with pytest.raises(ValueError, match=r"step must be given.* has counted \[1, 2\]"):
        lb.adopt_state(LAMB, PARAMS, (adam, count._replace(count=count.count - 1)))


def test_other_parameters_are_refused():
    state = optax.adamw(0.1).init({"kernel": jnp.ones((8, 2, 3)), "bias": jnp.ones((8, 3))})
    with pytest.raises(ValueError, match=r"'bias' has \(3,\) and its moments have \(8, 3\)"):
        lb.adopt_state(lb.lamb(0.1), PARAMS, state)
    with pytest.raises(TypeError, match="step must be a Python integer"):
        lb.adopt_state(lb.lamb(0.1), PARAMS, state, step=1.0)


def test_a_state_of_pmap_is_refused():
    state = switches.state_after(optax.adamw(0.1))
    state, copies = jax.tree.map(lambda x: jnp.stack([x] * 8), (state, PARAMS))
    for params, step in itertools.product((PARAMS, copies), (None, 2)):
        with pytest.raises(ValueError, match=r"has the shape \(8,\).* Pass one of them, as in"):
            lb.adopt_state(lb.lamb(0.1), params, state, step=step)


def test_a_state_on_the_host_is_read_under_a_guard():
    state = switches.state_after(optax.adamw(0.1))
    expected = lb.adopt_state(LAMB, PARAMS, state)
    on_host = jax.device_get(state)
    with jax.transfer_guard("disallow"):
        adopted = lb.adopt_state(LAMB, PARAMS, on_host)
    chex.assert_trees_all_equal(adopted, expected)


def test_inside_of_jit_it_is_refused():
    state = switches.state_after(optax.adamw(0.1))
    with pytest.raises(ValueError, match=r"must be called outside of jax\.jit"):
        jax.jit(lambda state: lb.adopt_state(lb.lamb(0.1), PARAMS, state))(state)


AS_PURE = getattr(nnx, "as_pure", None) or nnx.pure
"""Its name in older versions of Flax is pure."""


def test_arguments_of_another_kind_are_refused():
    adamw, new = optax.adamw(0.1), lb.lamb(0.1)
    state = switches.state_after(adamw)
    whole = TrainState.create(apply_fn=None, params=PARAMS, tx=adamw)
    with pytest.raises(TypeError, match="optimizer must be a gradient transformation, got <func"):
        lb.adopt_state(lb.lamb, PARAMS, state)
    with pytest.raises(TypeError, match="old_optimizer must be a gradient transformation"):
        lb.adopt_state(new, PARAMS, state, old_optimizer=optax.adamw)
    with pytest.raises(TypeError, match=r"got a TrainState\. .* has it as its opt_state"):
        lb.adopt_state(new, PARAMS, whole)
    with pytest.raises(TypeError, match="floating point or complex arrays; '0/count'"):
        lb.adopt_state(new, state, PARAMS)


def test_in_nnx():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    before = nnx.Optimizer(model, optax.adamw(0.1), wrt=nnx.Param)
    before.update(model, nnx.state(model, nnx.Param))
    params, state = AS_PURE(nnx.state(model, nnx.Param)), AS_PURE(before.opt_state)
    after = nnx.Optimizer(model, lb.lamb(0.1), wrt=nnx.Param)
    adopted = lb.adopt_state(after.tx, params, state)
    in_boxes = before.opt_state
    chex.assert_trees_all_equal(lb.adopt_state(after.tx, params, in_boxes), adopted)
    nnx.update(after.opt_state, nnx.state(adopted))
    adam = AS_PURE(after.opt_state)[1]
    chex.assert_trees_all_equal(adam.mu, state[0].mu)
    assert int(adam.count) == 1
    after.update(model, nnx.state(model, nnx.Param))
    assert int(AS_PURE(after.opt_state)[1].count) == 2


OF_TWO = {
    "encoder": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)},
    "head": {"kernel": jnp.ones((3, 2))},
}
LABELS = {"encoder": "slow", "head": "fast"}


def of_two(optimizer, encoder=None):
    """An optimizer for each of the two, or two of the same."""
    return optax.partition({"slow": encoder or optimizer, "fast": optimizer}, LABELS)


@pytest.mark.parametrize(
    "new",
    [lb.lamb(0.1), of_two(lb.lamb(0.1)), of_two(lb.lamb(0.1), optax.set_to_zero())],
    ids=["all in one", "two", "one is frozen now"],
)
def test_moments_of_two_labels(new):
    old = of_two(optax.adam(0.1))
    _, state = old.update(OF_TWO, old.init(OF_TWO), OF_TWO)
    adopted = lb.adopt_state(new, OF_TWO, state, old_optimizer=old)
    _, expected = new.update(OF_TWO, new.init(OF_TWO), OF_TWO)
    for kind in ("mu", "nu", "count"):
        found, wanted = (
            [own for _, own in optax.tree.get_all_with_path(of, kind)] for of in (adopted, expected)
        )
        chex.assert_trees_all_close(found, wanted, rtol=1e-6)
    chex.assert_trees_all_equal_structs(adopted, expected)
    jax.jit(new.update)(OF_TWO, adopted, OF_TWO)


def test_another_structure_is_named():
    state = optax.adam(0.1).init(OF_TWO | {"more": jnp.ones(2)})
    with pytest.raises(ValueError, match="the mu of state must have the tree structure of params"):
        lb.adopt_state(lb.lamb(0.1), OF_TWO, state)


MULTI_STEPS = optax.MultiSteps(ADAM, 4)
ACCUMULATED = lb.accumulate_gradients(LAMB, every=4)
ALL = {"MultiSteps": MULTI_STEPS, "accumulated": ACCUMULATED, "plain": LAMB}


def test_between_two_macro_batches():
    state = switches.state_after(MULTI_STEPS, 4)
    adopted = lb.adopt_state(ACCUMULATED, PARAMS, state)
    assert (int(adopted.macro_step), int(adopted.micro_step), float(adopted.examples)) == (1, 0, 0)
    for optimizer in (ACCUMULATED, LAMB):
        back = lb.adopt_state(MULTI_STEPS, PARAMS, lb.adopt_state(optimizer, PARAMS, state))
        chex.assert_trees_all_equal(back, state)


@pytest.mark.parametrize("new", ALL)
@pytest.mark.parametrize("old", ["MultiSteps", "accumulated"])
def test_in_the_middle_of_one(old, new):
    name = "micro_step" if old == "accumulated" else "mini_step"
    with pytest.raises(ValueError, match=rf"and its {name} is 3\. Finish the macro-batch with"):
        lb.adopt_state(ALL[new], PARAMS, switches.state_after(ALL[old], 3))
