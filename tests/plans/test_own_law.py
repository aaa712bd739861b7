"""An optimizer of one's own: its row of the law, its plan, and `planned_optimizer`."""

import jax.numpy as jnp
from numpy.testing import assert_allclose
import pytest

import optax_largebatch as lb
from tests.helpers import trained

LAW = {"learning_rate": (1, -0.25), "momentum": (1, -0.5), "eps": (0.5,)}
PARAMS = {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}


def tuned(**changed):
    given = {
        "optimizer": "own", "batch_size": 16, "total": 16_000, "learning_rate": 0.1,
        "weight_decay": 0.02, "momentum": 0.95, "law": LAW,
    }  # fmt: skip
    return lb.TunedRun(**given | changed)


def own(learning_rate, momentum, weight_decay=0.0, **others):
    return lb.chain(
        lb.accumulate_momentum(momentum),
        lb.add_decayed_weights(weight_decay),
        lb.scale_by_learning_rate(learning_rate),
    )


def test_its_numbers_move_by_its_row():
    run = tuned(eps=1e-4, b2=0.99)
    assert run.numbers == {"momentum": 0.95, "b2": 0.99, "eps": 1e-4}
    plan = lb.batch_plan(64, total=64_000, run=run)
    moved = {name: own.value for name, own in plan.moved(64).items()}
    k = r = 4
    rate = k * r**-0.25
    assert_allclose(moved["learning_rate"], rate)
    assert_allclose(moved["weight_decay"], k / (r * rate))  # decoupled, by default
    assert_allclose(moved["momentum"], 1 - 0.05 * k / r**0.5)
    assert_allclose(moved["b2"], 0.99**4)  # the same half-life, as in every row
    assert_allclose(moved["eps"], 1e-4 * k**0.5)
    assert "by the law 'own'" in str(plan)
    assert "nobody here has measured it" in str(plan)
    by_root = lb.batch_plan(64, total=64_000, run=run, law="sqrt")
    assert_allclose(by_root.moved(64)["learning_rate"].value, 2)


@pytest.mark.parametrize("law", [LAW, tuple(LAW.items())])
def test_plans_with_it_are_data(law):
    plan = lb.batch_plan("0:16 8k:64", total=16_000, run=tuned(law=law))
    assert lb.BatchPlan.from_json(plan.to_json()) == plan
    assert hash(plan) == hash(lb.batch_plan("0:16 8k:64", total=16_000, run=tuned()))


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"optimizer": "adamw"}, ValueError, "law must be None for 'adamw'"),
        ({"optimizer": "sqrt"}, ValueError, "law must be None for 'sqrt'"),
        ({"optimizer": "adamv", "law": None}, ValueError, "optimizer must be one of"),
        ({"law": {"momentum": (1, 0)}}, ValueError, "law must have learning_rate"),
        ({"law": LAW | {"moment": (1, 0)}}, ValueError, "got .*'moment'"),
        ({"law": LAW | {"b2": (1, 2, 3)}}, TypeError, "a power of k and one of r"),
        ({"law": 0.5}, TypeError, "a power of k and one of r"),
        ({"law": {"learning_rate": ("k", 0)}}, TypeError, "law, learning_rate must be a number"),
    ],
)
def test_what_is_no_row(changed, error, words):
    with pytest.raises(error, match=words):
        tuned(**changed)


def test_no_way_leads_from_it_to_another():
    with pytest.raises(ValueError, match="nobody knows its numbers from those of own"):
        tuned().to("muonh")
    with pytest.raises(ValueError, match="law must be one of"):
        lb.batch_plan(64, total=64_000, run=lb.TunedRun(
            "lamb", batch_size=16, total=16_000, learning_rate=0.1
        ), law="own")  # fmt: skip


def after_three_steps(optimizer):
    (params, _), _ = trained(optimizer, PARAMS, lambda params, _: params, jnp.arange(3))
    return params["kernel"]


def test_planned_optimizer_builds_it():
    plan = lb.batch_plan(64, total=16_000, run=tuned())
    planned = lb.planned_optimizer(plan, PARAMS, optimizer=own)
    by_hand = own(lambda step: 0.4, 0.8, lambda step: 0.02)
    assert_allclose(after_three_steps(planned), after_three_steps(by_hand), rtol=1e-5)
    twice = lb.planned_optimizer(plan, PARAMS, optimizer=own, momentum=0.4)
    assert not jnp.allclose(after_three_steps(planned), after_three_steps(twice))


def test_a_momentum_that_moves_is_a_schedule():
    plan = lb.batch_plan("0:16 8k:64", total=16_000, run=tuned())
    state = lb.planned_optimizer(plan, PARAMS, optimizer=own).init(PARAMS)
    assert_allclose(state.hyperparams["momentum"], 0.95, rtol=1e-6)


def test_planned_optimizer_has_to_be_given_it():
    plan = lb.batch_plan(64, total=16_000, run=tuned())
    with pytest.raises(ValueError, match=r"optimizer must be a function .* got None for 'own'"):
        lb.planned_optimizer(plan, PARAMS)
    of_lamb = lb.TunedRun("lamb", batch_size=16, total=16_000, learning_rate=0.1)
    plan = lb.batch_plan(64, total=16_000, run=of_lamb)
    with pytest.raises(ValueError, match=r"None for others; got .*own.* for 'lamb'"):
        lb.planned_optimizer(plan, PARAMS, optimizer=own)
