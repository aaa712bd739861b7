"""A change of the optimizer in the middle of a macro-batch."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_largebatch as lb
from tests.adoption.switches import PARAMS, SCHEDULE, gradients, state_after

MULTI_STEPS = optax.MultiSteps(optax.adam(SCHEDULE), 4)
ACCUMULATED = lb.accumulate_gradients(lb.lamb(SCHEDULE), every=4)
PLAIN = lb.lamb(SCHEDULE)


def test_adopted_micro_batches_weigh_as_much_as_their_examples():
    """Two micro-batches of 8 examples, and then two larger ones."""
    state, expected = MULTI_STEPS.init(PARAMS), ACCUMULATED.init(PARAMS)
    first, second, third, last = gradients(4)
    for gradient in (first, second):
        _, state = MULTI_STEPS.update(gradient, state, PARAMS)
        _, expected = ACCUMULATED.update(gradient, expected, PARAMS, examples=8)
    state = lb.adopt_state(ACCUMULATED, PARAMS, state, examples_per_micro_batch=8)
    for gradient, examples in ((third, 32), (last, 16)):
        updates, state = ACCUMULATED.update(gradient, state, PARAMS, examples=examples)
        same, expected = ACCUMULATED.update(gradient, expected, PARAMS, examples=examples)
    assert lb.has_updated(state)
    chex.assert_trees_all_close((updates, state), (same, expected), rtol=1e-5)


def test_their_size_must_be_given():
    with pytest.raises(ValueError, match=r"examples_per_micro_batch must be given .* is 2, and"):
        lb.adopt_state(ACCUMULATED, PARAMS, state_after(MULTI_STEPS, 2))
    for wrong, error in ((0, ValueError), ("8", TypeError)):
        with pytest.raises(error, match="examples_per_micro_batch must be"):
            lb.adopt_state(
                ACCUMULATED, PARAMS, state_after(MULTI_STEPS, 2), examples_per_micro_batch=wrong
            )


def test_between_two_macro_batches_nothing_must_be_given():
    state = state_after(MULTI_STEPS, 4)
    adopted = lb.adopt_state(ACCUMULATED, PARAMS, state)
    assert (int(adopted.macro_step), int(adopted.micro_step), float(adopted.examples)) == (1, 0, 0)
    for optimizer in (ACCUMULATED, PLAIN):
        back = lb.adopt_state(MULTI_STEPS, PARAMS, lb.adopt_state(optimizer, PARAMS, state))
        chex.assert_trees_all_equal(back, state)


def test_a_state_that_counts_examples_itself_is_believed():
    state = ACCUMULATED.init(PARAMS)
    for gradient, examples in zip(gradients(2), (8, 24), strict=True):
        _, state = ACCUMULATED.update(gradient, state, PARAMS, examples=examples)
    for given in (None, 16):
        adopted = lb.adopt_state(ACCUMULATED, PARAMS, state, examples_per_micro_batch=given)
        chex.assert_trees_all_equal(adopted, state)
    with pytest.raises(ValueError, match=r"=8 is not what .* 32 examples in 2 micro-batches"):
        lb.adopt_state(ACCUMULATED, PARAMS, state, examples_per_micro_batch=8)


def test_the_noise_scale_of_the_macro_batch_has_all_its_micro_batches():
    inner = lb.chain(lb.measure_noise_scale(), lb.lamb(SCHEDULE))
    optimizer = lb.accumulate_gradients(inner, every=4, small_batches=True)
    state = optimizer.init(PARAMS)
    for gradient in gradients(3):
        _, state = optimizer.update(gradient, state, PARAMS)
    adopted = lb.adopt_state(optimizer, PARAMS, state)
    chex.assert_trees_all_equal(adopted.small_batches, state.small_batches)
    assert float(adopted.small_batches.number) == 3


LOST = {
    "MultiSteps to plain": (MULTI_STEPS, PLAIN),
    "accumulated to plain": (ACCUMULATED, PLAIN),
    "accumulated to MultiSteps": (ACCUMULATED, MULTI_STEPS),
}


@pytest.mark.parametrize("name", LOST)
def test_no_micro_batch_is_lost(name):
    old, new = LOST[name]
    with pytest.raises(ValueError, match=r"state must be between two macro-batches: .* is 3, and"):
        lb.adopt_state(new, PARAMS, state_after(old, 3))
    lb.adopt_state(new, PARAMS, state_after(old, 4))


def test_inside_of_jit_it_is_not_known_whether_there_are_any():
    def adopt(optimizer, **given):
        return jax.jit(lambda state: lb.adopt_state(optimizer, PARAMS, state, step=1, **given))

    state = state_after(MULTI_STEPS, 6)
    with pytest.raises(ValueError, match=r"must be called outside of jax.jit here"):
        adopt(PLAIN)(state)
    with pytest.raises(ValueError, match=r"examples_per_micro_batch must be given .* not known"):
        adopt(ACCUMULATED)(state)
    adopted = adopt(ACCUMULATED, examples_per_micro_batch=jnp.array(8))(state)
    assert (int(adopted.micro_step), float(adopted.examples)) == (2, 16)
