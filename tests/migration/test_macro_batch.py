"""A change of the optimizer between two macro-batches, and in the middle of one."""

import chex
import jax
import optax
import pytest

import optax_largebatch as lb
from tests.migration.switches import PARAMS, SCHEDULE, state_after

MULTI_STEPS = optax.MultiSteps(optax.adam(SCHEDULE), 4)
ACCUMULATED = lb.accumulate_gradients(lb.lamb(SCHEDULE), every=4)
PLAIN = lb.lamb(SCHEDULE)
ALL = {"MultiSteps": MULTI_STEPS, "accumulated": ACCUMULATED, "plain": PLAIN}


def test_between_two_macro_batches():
    state = state_after(MULTI_STEPS, 4)
    adopted = lb.adopt_state(ACCUMULATED, PARAMS, state)
    assert (int(adopted.macro_step), int(adopted.micro_step), float(adopted.examples)) == (1, 0, 0)
    for optimizer in (ACCUMULATED, PLAIN):
        back = lb.adopt_state(MULTI_STEPS, PARAMS, lb.adopt_state(optimizer, PARAMS, state))
        chex.assert_trees_all_equal(back, state)


@pytest.mark.parametrize("new", ALL)
@pytest.mark.parametrize("old", ["MultiSteps", "accumulated"])
def test_in_the_middle_of_one(old, new):
    name = "micro_step" if old == "accumulated" else "mini_step"
    with pytest.raises(ValueError, match=rf"and its {name} is 3\. Finish the macro-batch with"):
        lb.adopt_state(ALL[new], PARAMS, state_after(ALL[old], 3))


def test_inside_of_jit_it_is_not_known_whether_one_has_begun():
    adopt = jax.jit(lambda state: lb.adopt_state(PLAIN, PARAMS, state, step=1))
    with pytest.raises(ValueError, match=r"its mini_step is not known inside jax.jit. Fin"):
        adopt(state_after(MULTI_STEPS, 4))
