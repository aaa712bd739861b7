"""What a momentum buffer sums is read from the order of the links, or compared."""

from collections import OrderedDict

import jax
import optax
import pytest

import optax_largebatch as lb
from tests.adoption.switches import PARAMS, inject, state_after

BEFORE_THE_RATE = lb.chain(lb.accumulate_momentum(0.9), lb.scale_by_learning_rate(0.1))
BEHIND_THE_RATE = lb.chain(lb.scale_by_learning_rate(0.1), lb.accumulate_momentum(0.9))
CLIP, RATE, TRACE = optax.clip(100.0), optax.scale(-0.1), optax.trace(0.9)
SCHEDULED = optax.scale_by_schedule(lambda count: -0.1)
FROZEN = optax.masked(optax.set_to_zero(), {"kernel": False, "bias": True})
ALL = dict.fromkeys(PARAMS, True)


def partition(inner):
    return optax.partition({"all": inner, "none": optax.identity()}, dict.fromkeys(PARAMS, "all"))


GRADIENTS = {
    "sgd": optax.sgd(0.1, 0.9),
    "clipped sgd": optax.chain(CLIP, optax.sgd(0.1, 0.9)),
    "a nested chain that ends in trace": optax.chain(optax.chain(CLIP, TRACE), RATE),
    "the same, masked": optax.chain(optax.masked(optax.chain(CLIP, TRACE), ALL), RATE),
    "the same, injected": optax.chain(inject(optax.trace, decay=0.9), RATE),
    "in a partition": optax.chain(partition(optax.chain(CLIP, TRACE)), RATE),
    "nothing but trace": TRACE,
}
STEPS = {
    "trace behind the rate": optax.chain(RATE, TRACE),
    "in nested chains": optax.chain(CLIP, optax.chain(RATE, TRACE)),
    "masked": optax.chain(RATE, optax.masked(TRACE, ALL)),
    "injected": optax.chain(RATE, inject(optax.trace, decay=0.9)),
    "a schedule": optax.chain(optax.chain(SCHEDULED, TRACE), CLIP),
    "with a frozen parameter": optax.chain(optax.chain(RATE, TRACE), FROZEN),
}


@pytest.mark.parametrize("name", [*GRADIENTS, *STEPS])
def test_gradients_and_steps_are_told_apart(name):
    old = GRADIENTS.get(name) or STEPS[name]
    right, wrong = BEFORE_THE_RATE, BEHIND_THE_RATE
    is_one, wants = "gradients", "gradients times learning rates"
    if name in STEPS:
        right, wrong, is_one, wants = wrong, right, wants, is_one
    state = state_after(old)
    with pytest.raises(ValueError, match=f"one of {is_one}, and optimizer has one of {wants}. The"):
        lb.adopt_state(wrong, PARAMS, state, step=2)
    lb.adopt_state(right, PARAMS, state, step=2)


@pytest.mark.parametrize("behind", [CLIP, FROZEN], ids=["clipped", "frozen"])
def test_lars_is_told_in_any_chain(behind):
    state = state_after(optax.chain(CLIP, optax.lars(0.1), behind))
    lb.adopt_state(lb.lars(0.1), PARAMS, state, step=2)
    with pytest.raises(ValueError, match="one of gradients times trust ratios times learning rat"):
        lb.adopt_state(BEFORE_THE_RATE, PARAMS, state, step=2)


def test_where_places_mislead_the_buffers_are_compared():
    """A rate that the training loop multiplies, and one before two links that keep nothing."""
    outside = optax.chain(CLIP, TRACE)
    with pytest.raises(ValueError, match="If you know that the two are the same, pass old_opt"):
        lb.adopt_state(BEFORE_THE_RATE, PARAMS, state_after(outside), step=2)
    lb.adopt_state(BEFORE_THE_RATE, PARAMS, state_after(outside), step=2, old_optimizer=outside)
    clipped = optax.chain(RATE, TRACE, CLIP)
    with pytest.raises(ValueError, match=r"an element of trace of 'bias' is .* in old_optimizer"):
        lb.adopt_state(BEFORE_THE_RATE, PARAMS, state_after(clipped), step=2, old_optimizer=clipped)


def test_named_links():
    """Newer versions of optax.named_chain keep their order, which jax.jit loses in older ones."""
    links = [("rate", RATE.init(PARAMS)), ("momentum", TRACE.init(PARAMS))]
    kept, lost = jax.jit(lambda: (OrderedDict(links), dict(links)))()
    lb.adopt_state(BEHIND_THE_RATE, PARAMS, kept, step=2)
    for new in (BEFORE_THE_RATE, BEHIND_THE_RATE):
        with pytest.raises(ValueError, match=r"old_optimizer must be given: .* 'momentum', 'rate'"):
            lb.adopt_state(new, PARAMS, lost, step=2)
