"""The optimizer of a plan is the one that one would write by hand."""

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose
import optax
import pytest

import optax_largebatch as lb
from tests import helpers
from tests.conftest import slow_but

PARAMS = {
    "embed": jnp.ones((8, 4)),
    "layer": {
        "kernel": jnp.arange(16.0).reshape(4, 4) + jnp.eye(4),
        "bias": jnp.ones(4),
        "norm": {"scale": jnp.ones(4)},
    },
    "head": jnp.ones((4, 8)),
}
DECAYED = ~lb.matching_kinds("bias", "norm")
BATCH, TOTAL = 64, 6400


def planned(optimizer, batch=256, law=None, kind=None, **options):
    rate = lb.PlannedRate(0.01, warmup=640)
    decay = 0.0 if optimizer in ("muonh", "adamh") else 0.1
    run = lb.TunedRun(
        optimizer,
        batch_size=BATCH,
        total=TOTAL,
        learning_rate=rate,
        weight_decay=decay,
        decay_kind=kind,
    )
    return lb.batch_plan(batch, total=TOTAL, run=run, law=law, **options)


def by_hand(optimizer, plan):
    """The same optimizers, from the numbers that four times the batch gives."""
    rate = plan.learning_rate
    adam = {"b1": 0.7, "b2": 0.999**4}
    decay = {"decoupled": 0.2, "rescaled": 0.1, "l2": 0.1}[plan.run.kind]
    masks = {"weight_decay_mask": DECAYED, "trust_ratio_mask": DECAYED}
    adamw = optax.adamw(rate, **adam, eps=5e-9, weight_decay=decay, mask=DECAYED.mask)
    layers = ~lb.matching("embed|head")
    return {
        "adamw": lambda: adamw,
        "lamb": lambda: lb.lamb(rate, **adam, eps=5e-7, weight_decay=decay, **masks),
        "lans": lambda: lb.lans(rate, **adam, eps=5e-7, weight_decay=decay, **masks),
        "lars": lambda: lb.lars(rate, decay, momentum=0.9, **masks),
        "sgd": lambda: optax.chain(
            optax.add_decayed_weights(decay, DECAYED.mask), optax.sgd(rate, momentum=0.9)
        ),
        "muon": lambda: lb.muon(
            rate, beta=0.8, weight_decay=decay, consistent_rms=0.2, others=adamw, matrix_mask=layers
        ),
        "muonh": lambda: lb.muonh(
            rate, beta=0.8, b1=0.7, b2=0.95, adam_eps=5e-9, matrix_mask=layers
        ),
        "adamh": lambda: lb.adamh(
            rate, b1=0.7, b2=0.95, eps=5e-9, adamh_mask=lb.matching("layer/kernel")
        ),
    }[optimizer]()


def trained(optimizer, calls):
    def gradients(params, call):
        return jax.tree.map(lambda x: jnp.cos(x + call), params)

    return helpers.trained(optimizer, PARAMS, gradients, jnp.arange(calls, dtype=float))[0][0]


OPTIMIZERS = ("adamw", "lamb", "lans", "lars", "sgd", "muon", "muonh", "adamh")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_is_the_optimizer_written_by_hand(optimizer):
    plan = planned(optimizer)
    found = trained(lb.planned_optimizer(plan, PARAMS), 5)
    with jax.numpy_dtype_promotion("standard"):  # for optax.adamw
        expected = trained(by_hand(optimizer, plan), 5)
    jax.tree.map(lambda x, y: assert_allclose(x, y, rtol=2e-5), found, expected)


@pytest.mark.parametrize("optimizer", slow_but(("sgd",), ["lars", "sgd"]))
def test_a_momentum_that_moves(optimizer, x64):
    """In each step it is that of an optimizer with the number of this step."""
    plan = planned(optimizer, "0:64 192:256 700:512", law="adamw", kind="l2")
    assert [round(float(plan.momentum(step)), 6) for step in (0, 3, 5)] == [0.9, 0.7, 0.7]
    params = jax.tree.map(lambda x: x.astype(float), PARAMS)
    scheduled = lb.planned_optimizer(plan, params)
    trained, state, expected, buffer = params, scheduled.init(params), params, None
    for step in range(7):
        gradients = jax.tree.map(lambda x, step=step: jnp.cos(x + step), params)
        updates, state = jax.jit(scheduled.update)(gradients, state, trained)
        trained = optax.apply_updates(trained, updates)
        alone = lb.planned_optimizer(plan, params, momentum=float(plan.momentum(step)))
        buffer = alone.init(params) if buffer is None else buffer
        updates, buffer = alone.update(gradients, buffer, expected)
        expected = optax.apply_updates(expected, updates)
    jax.tree.map(lambda x, y: assert_allclose(x, y, 1e-12), trained, expected)
    assert "momentum" in str(lb.explain(scheduled, params))


@pytest.mark.parametrize("law", ["adamw", "adam_sde"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_takes_the_law_of_another_optimizer(optimizer, law):
    for micro_batch_size in (None, 32):
        plan = planned(optimizer, "0:64 192:256", law=law, micro_batch_size=micro_batch_size)
        optimizer_of_plan = lb.planned_optimizer(plan, PARAMS)
        state = jax.eval_shape(optimizer_of_plan.init, PARAMS)
        jax.eval_shape(optimizer_of_plan.update, PARAMS, state, PARAMS)


@pytest.mark.parametrize("optimizer", slow_but(("muonh",), OPTIMIZERS))
def test_clips_the_gradient_of_the_whole_batch(optimizer):
    """Not that of each micro-batch, which would bound the noise of each by itself."""
    alone = lb.planned_optimizer(planned(optimizer), PARAMS)
    clipped = lb.planned_optimizer(
        planned(optimizer, micro_batch_size=128), PARAMS, max_grad_norm=1.0
    )
    parts = [jax.tree.map(lambda x, c=c: jnp.cos(c * x), PARAMS) for c in (1, 2)]
    whole = jax.tree.map(lambda x, y: (x + y) / 2, *parts)
    norm = optax.tree.norm(whole)
    assert norm > 1
    state, expected = clipped.init(PARAMS), alone.init(PARAMS)
    for _ in range(2):
        for part in parts:
            updates, state = clipped.update(part, state, PARAMS)
        by_hand, expected = alone.update(optax.tree.scale(1 / norm, whole), expected, PARAMS)
    jax.tree.map(lambda x, y: assert_allclose(x, y, rtol=2e-4, atol=1e-9), updates, by_hand)


def test_other_arguments_go_to_the_optimizer():
    plan = planned("muonh")
    optimizer = lb.planned_optimizer(plan, PARAMS, adamh_mask=lb.matching("head"))
    (line,) = [line for line in str(lb.explain(optimizer, PARAMS)).splitlines() if "head" in line]
    assert "sphere" in line
    with pytest.raises(TypeError, match="weight_decay"):
        lb.planned_optimizer(plan, PARAMS, weight_decay=0.1)


@pytest.mark.parametrize(("optimizer", "momentum"), [("adamw", "b1"), ("sgd", "momentum")])
def test_arguments_of_a_chain_are_not_left_out(optimizer, momentum):
    found, nesterov, slow = (
        trained(lb.planned_optimizer(planned(optimizer), PARAMS, **arguments), 2)
        for arguments in ({}, {"nesterov": True}, {momentum: 0.5})
    )
    assert not np.allclose(found["head"], nesterov["head"], rtol=1e-3)
    assert not np.allclose(found["head"], slow["head"], rtol=1e-3)
    with pytest.raises(TypeError, match="ns_dtype"):
        lb.planned_optimizer(planned(optimizer), PARAMS, ns_dtype="bfloat16")


@pytest.mark.parametrize(
    ("optimizer", "kind"),
    [
        ("adamw", "independent"),
        ("adamw", "l2"),
        ("muon", "independent"),
        ("sgd", "decoupled"),
        ("lamb", "decoupled"),
    ],
)
def test_a_decay_that_would_be_built_as_another_kind(optimizer, kind):
    """1e-4 of midGPT would be 1000 times too weak."""
    with pytest.raises(ValueError, match=r"decay_kind must be .* for planned_optimizer"):
        lb.planned_optimizer(planned(optimizer, kind=kind), PARAMS)


@pytest.mark.parametrize("optimizer", ["muonh", "adamh"])
def test_there_is_no_decay_on_spheres(optimizer):
    run = lb.TunedRun(optimizer, batch_size=8, total=100, learning_rate=0.1, weight_decay=0.1)
    with pytest.raises(ValueError, match=f"weight_decay must be 0 for '{optimizer}'"):
        lb.planned_optimizer(lb.batch_plan(8, total=100, run=run), PARAMS)


def test_refuses_a_plan_without_a_run():
    with pytest.raises(ValueError, match="plan must have a run"):
        lb.planned_optimizer(lb.batch_plan(8, total=100), PARAMS)
    with pytest.raises(TypeError, match="plan must be a BatchPlan"):
        lb.planned_optimizer(0.1, PARAMS)
