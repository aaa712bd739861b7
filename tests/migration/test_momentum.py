"""What a momentum buffer sums is found by comparing it with that of the old optimizer."""

import jax
import optax
import pytest

import optax_largebatch as lb
from tests.migration.switches import BY_LAYER, PARAMS, SCHEDULE, state_after

BEFORE_THE_RATE = lb.chain(lb.accumulate_momentum(0.9), lb.scale_by_learning_rate(0.1))
BEHIND_THE_RATE = lb.chain(lb.scale_by_learning_rate(0.1), lb.accumulate_momentum(0.9))
CLIP, RATE, TRACE = optax.clip(100.0), optax.scale(-0.1), optax.trace(0.9)
LARS, SGD = optax.lars(SCHEDULE), optax.sgd(SCHEDULE, 0.9)

TAKEN = {
    "sgd": (optax.sgd(0.1, 0.9), BEFORE_THE_RATE),
    "a rate in the training loop": (optax.chain(CLIP, TRACE), BEFORE_THE_RATE),
    "trace behind the rate": (optax.chain(RATE, TRACE), BEHIND_THE_RATE),
    "two links behind the rate": (optax.chain(RATE, TRACE, CLIP), BEHIND_THE_RATE),
    "lars in a chain": (optax.chain(CLIP, LARS), lb.lars(SCHEDULE)),
    "each for its own parameter": (
        optax.partition({"a": SGD, "b": SGD}, {"kernel": "a", "bias": "b"}),
        BY_LAYER,
    ),
}
REFUSED = {
    "steps for gradients": (BEHIND_THE_RATE, BEFORE_THE_RATE),
    "gradients for steps": (SGD, BEHIND_THE_RATE),
    "gradients for steps of lars": (SGD, lb.lars(0.1)),
    "gradients for directions": (SGD, lb.larc(0.1)),
    "steps for directions": (LARS, lb.lars(0.1, learning_rate_in_momentum=False)),
}


@pytest.mark.parametrize("name", TAKEN)
def test_the_same_sum_is_taken_over(name):
    old, new = TAKEN[name]
    state = state_after(old)
    adopted = lb.adopt_state(new, PARAMS, state, step=2, old_optimizer=old)
    (_, trace), *_ = optax.tree.get_all_with_path(adopted, "trace")
    sums = [
        x for _, own in optax.tree.get_all_with_path(state, "trace") for x in jax.tree.leaves(own)
    ]
    assert {id(x) for x in jax.tree.leaves(trace)} == {id(x) for x in sums}


@pytest.mark.parametrize("name", REFUSED)
def test_another_sum_is_refused(name):
    old, new = REFUSED[name]
    says = r"an element of trace of '.*' is .* in old_optimizer and .*: optax.sgd sums gradients"
    with pytest.raises(ValueError, match=says):
        lb.adopt_state(new, PARAMS, state_after(old), step=2, old_optimizer=old)


def test_a_buffer_alone_does_not_say_what_it_sums():
    with pytest.raises(ValueError, match=r"old_optimizer must be given, .*old_optimizer=optax.sgd"):
        lb.adopt_state(BEFORE_THE_RATE, PARAMS, state_after(SGD))
