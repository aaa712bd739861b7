"""Another optimizer in the middle of a run, as if it had been there from the start."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_largebatch as lb

PARAMS = {"kernel": jnp.arange(1.0, 7.0).reshape(2, 3), "bias": jnp.ones(3)}
SCHEDULE = optax.linear_schedule(0.1, 0.0, 20)
DECAY = {"weight_decay": 0.01}
BY_LAYER = lb.chain(
    lb.accumulate_momentum(0.9), lb.scale_by_trust_ratio(0.01), lb.scale_by_learning_rate(SCHEDULE)
)

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.fixture
def standard_promotion():
    """What optax needs."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def gradients(count):
    rng = np.random.default_rng(0)
    return [
        jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), PARAMS)
        for _ in range(count)
    ]


def inject(factory, **known):
    return optax.inject_hyperparams(factory)(**known)


def micro(inner):
    return optax.MultiSteps(inner, 3)


def chained(inner):
    return optax.chain(optax.clip_by_global_norm(1.0), inner)


SWITCHES = {
    "adam to lamb": (optax.adam(SCHEDULE), lb.lamb(SCHEDULE, **DECAY)),
    "adamw to lamb": (optax.adamw(0.1), lb.lamb(SCHEDULE, **DECAY)),
    "lamb to lamb": (optax.lamb(SCHEDULE), lb.lamb(SCHEDULE, **DECAY)),
    "adam to eve": (optax.adam(SCHEDULE, b2=0.98), lb.eve(SCHEDULE)),
    "lars to lars": (optax.lars(0.1), lb.lars(0.1)),
    "lars to lars, with schedules": (optax.lars(SCHEDULE), lb.lars(SCHEDULE)),
    "sgd to a chain": (optax.sgd(0.1, 0.9), BY_LAYER),
    "sgd with a schedule to a chain": (optax.sgd(SCHEDULE, 0.9), BY_LAYER),
    "clipped adamw to lamb": (
        chained(optax.adamw(SCHEDULE)),
        lb.lamb(SCHEDULE, max_grad_norm=1.0),
    ),
    "injected adamw to lamb": (
        inject(optax.adamw, learning_rate=SCHEDULE),
        lb.lamb(SCHEDULE, **DECAY),
    ),
    "adamw to injected lamb": (
        optax.adamw(SCHEDULE),
        inject(lb.lamb, learning_rate=SCHEDULE, **DECAY),
    ),
    "lamb to master weights": (optax.lamb(SCHEDULE), lb.master_weights(lb.lamb(SCHEDULE))),
    "MultiSteps of adamw to accumulated lamb": (
        micro(chained(optax.adamw(SCHEDULE))),
        lb.accumulate_gradients(lb.lamb(SCHEDULE, max_grad_norm=1.0), 3),
    ),
    "MultiSteps of injected sgd to an accumulated chain": (
        micro(inject(optax.sgd, learning_rate=SCHEDULE, momentum=0.9)),
        lb.skip_nonfinite(lb.accumulate_gradients(BY_LAYER, 3)),
    ),
    "accumulated to accumulated": (
        lb.accumulate_gradients(lb.larc(SCHEDULE), 3),
        lb.skip_nonfinite(lb.accumulate_gradients(lb.larc(SCHEDULE), 3)),
    ),
}
QUICK = ("adamw to lamb", "lars to lars", "MultiSteps of adamw to accumulated lamb")
DOES_NOT_SAY = ("lars to lars", "sgd to a chain")
"""The old state has not counted the steps."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in SWITCHES],
)
def test_the_next_steps_are_those_of_one_that_was_there_from_the_start(name):
    """That one is given the same gradients and parameters, and its own updates are thrown away.

    Macro-batches have three parts, so that the change is made in the middle of the second.
    """
    before = 4
    old, new = SWITCHES[name]
    params, state, expected_state = PARAMS, old.init(PARAMS), new.init(PARAMS)
    given = gradients(before + 4)
    for gradient in given[:before]:
        _, expected_state = new.update(gradient, expected_state, params)
        updates, state = old.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    step = before if name in DOES_NOT_SAY else None
    adopted = lb.adopt_state(new, params, state, step=step)
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
        optax.sgd(SCHEDULE, 0.9),
        lb.lamb(0.1),
        "state has moments of Adam 0 times, and optimizer has moments of Adam 1 times",
    ),
    "a buffer where there was none": (
        optax.adamw(SCHEDULE),
        lb.lars(0.1),
        "state has moments of Adam 1 times, and optimizer has moments of Adam 0 times",
    ),
    "gradients for steps": (
        optax.sgd(SCHEDULE, 0.9),
        lb.lars(0.1),
        "one of gradients, and optimizer has one of gradients times trust ratios times learning",
    ),
    "gradients for directions": (
        optax.sgd(SCHEDULE, 0.9),
        lb.larc(0.1),
        "one of gradients, and optimizer has one of gradients times trust ratios",
    ),
    "steps for directions": (
        optax.lars(SCHEDULE),
        lb.lars(0.1, momentum_of="directions"),
        "times learning rates, and optimizer has one of gradients times trust ratios. The",
    ),
    "no micro-batches": (
        optax.lars(SCHEDULE),
        lb.lbsgd(0.1, 0.9),
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
        "state has moments of Adam 0 times",
    ),
    "two optimizers": (
        optax.partition(dict.fromkeys("ab", optax.adam(0.1)), {"kernel": "a", "bias": "b"}),
        lb.lamb(0.1),
        "state has moments of Adam 2 times",
    ),
    "hidden parameters": (
        optax.masked(optax.adam(0.1), {"kernel": True, "bias": False}),
        lb.lamb(0.1),
        r"the moments .* 'bias' has \(3,\) and its moments have MaskedNode",
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
    state = old.init(PARAMS)
    for _ in range(2):
        _, state = old.update(PARAMS, state, PARAMS)
    if name == "two counts":
        state = (state[0], state[1]._replace(count=state[1].count - 1))
    with pytest.raises(ValueError, match=says):
        lb.adopt_state(new, PARAMS, state)


def test_other_parameters_are_refused():
    state = optax.adamw(0.1).init({"kernel": jnp.ones((8, 2, 3)), "bias": jnp.ones((8, 3))})
    with pytest.raises(ValueError, match=r"'bias' has \(3,\) and its moments have \(8, 3\)"):
        lb.adopt_state(lb.lamb(0.1), PARAMS, state)
    with pytest.raises(TypeError, match="step must be a Python integer"):
        lb.adopt_state(lb.lamb(0.1), PARAMS, state, step=1.0)
