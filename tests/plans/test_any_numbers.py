"""Numbers of every kind in every place of a plan: taken for what they are, or an error of ours."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_largebatch as lb
from optax_largebatch.plans.law import LAWS
from tests.conftest import enable_x64
from tests.plans.runs import tuned

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
PLAN = lb.batch_plan(
    "0:64 128:128", total=1000, micro_batch_size=32,
    run=tuned(lb.PlannedRate(1.0, decay="linear", end_value=0.5), 64, weight_decay=0.1),
)  # fmt: skip
READ = json.loads(PLAN.to_json())
CONSTANT = lb.PlannedRate(0.1)
OF_STEPS = ("batch_size", "micro_batches", "learning_rate", "weight_decay", "b1", "b2")

NO_NUMBERS = (None, "x", "", "1e3", "1_000", "\u0665", "\uff15", "\xb2", "2\u212a", True, [5], {},
              1j, object(), np.bool_(True), np.asarray(True), np.asarray([5]),
              np.datetime64("2020-01-01"))  # fmt: skip
NOT_WHOLE = (*NO_NUMBERS, 1.5, np.float32(5), np.asarray(1.5), jnp.float32(5), jnp.asarray(True),
             np.nan, np.inf, -1, np.int64(-1), np.asarray(-1), jnp.int32(-1), -1.0, "-1",
             10**400, -(10**400), 1e300, "5" * 5000, np.uint64(2**64 - 1))  # fmt: skip


def plan(stages=8, total=10**15, **options):
    return lb.batch_plan(stages, total=total, **options)


WHOLE = {
    "step_at": ("examples", PLAN.step_at),
    "step_at of tokens": ("tokens", lambda x: PLAN.step_at(tokens=x)),
    "a start": ("stages", lambda x: plan([(0, 8), (x, 16)])),
    "a batch": ("stages", lambda x: plan([(0, x)])),
    "a batch of a dict": ("stages", lambda x: plan({0: x})),
}
"""Whole numbers that are no arguments of a function: those are in `test_public_arguments.py`."""


@pytest.mark.parametrize("name", WHOLE)
def test_refuses_what_is_no_whole_number(name):
    argument, call = WHOLE[name]
    for value in NOT_WHOLE[1 if name.startswith("step_at") else 0 :]:  # it may be None
        with pytest.raises((TypeError, ValueError), match=rf"^{argument}.* must ") as caught:
            call(value)
        assert type(caught.value) in (TypeError, ValueError)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_takes_integers_of_every_type(dtype):
    for kind in (np.dtype(dtype).type, lambda x: np.asarray(x, dtype)):
        assert PLAN.step_at(kind(100)) == PLAN.step_at(100)
        starts = [(kind(0), kind(8)), (kind(99), "16")]
        devices = np.dtype(dtype).type(4)
        expected = lb.batch_plan("0:8 99:16", total=127, devices=4)
        assert lb.batch_plan(starts, total=kind(127), devices=devices) == expected


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_steps_of_every_type(dtype, x64):
    """The largest step that the type holds is past the end."""
    info = np.iinfo(dtype)
    late = min(info.max, 10**18)
    with enable_x64(x64):
        for method in (getattr(PLAN, name) for name in OF_STEPS):
            for step in (0, 2, 5, late):
                assert method(np.dtype(dtype).type(step)) == method(step)
            found = method(np.asarray([[0, 5, late]], dtype))
            np.testing.assert_array_equal(found, [[method(x) for x in (0, 5, late)]])
            if info.min < 0:
                with pytest.raises(ValueError, match="step must be an integer of 0 or more"):
                    method(np.asarray([5, info.min], dtype))
        assert PLAN.examples_at(np.asarray(late, dtype)) == PLAN.examples_at(late)


def test_steps_of_arrays_of_jax():
    for method in (getattr(PLAN, name) for name in OF_STEPS):
        assert jax.jit(method)(jnp.int32(-5)) == method(0)  # no value is known when it is traced
        assert jax.jit(method)(jnp.uint32(2**32 - 1)) == method(10**6) == method(jnp.uint32(2**31))
        for narrow in (jnp.int8(5), jnp.uint8(5)):  # the run has more steps than they can count
            assert jax.jit(method)(narrow) == method(5)
        for wrong in (-1, jnp.int32(-1), jnp.asarray([3, -1])):
            with pytest.raises(ValueError, match="step must be an integer of 0 or more, got"):
                method(wrong)
        for wrong in (jnp.float32(5), jnp.ones(3), jnp.asarray(True), np.ones(3), [5], 1.0, None):
            with pytest.raises(TypeError, match="step must be an integer of 0 or more, got"):
                method(wrong)
    with pytest.raises(TypeError, match="step must be an integer of 0 or more, got"):
        jax.jit(PLAN.examples_at)(5)


@pytest.mark.parametrize("batch", [2**31, 3_000_000_000, "3B", np.uint32(2**32 - 1), 10**18])
def test_a_batch_that_no_array_of_32_bits_holds(batch):
    with pytest.raises(ValueError, match=r"at most 2147483647, since .* give batch sizes in ex"):
        lb.batch_plan(batch, total=10**18)


def test_the_largest_counts():
    """No float of 32 bits is infinite, whatever the product."""
    large = lb.batch_plan(
        2**31 - 1, total=2**62, sequence_length=2**62,
        run=tuned(CONSTANT, 2**31 - 1, 2**62, weight_decay=0.1),
    )  # fmt: skip
    assert large.total_steps == 1
    assert np.isfinite(large.learning_rate(np.asarray([0, 1, 10**18]))).all()
    assert "  0.1 to 0.1  " in str(large)
    with pytest.raises(ValueError, match="the run has"):
        lb.batch_plan(8, total=np.asarray(10**18))
    assert lb.batch_plan(2**30, total=np.asarray(10**18)).total_steps == 931322575


@pytest.mark.parametrize(
    "text", ["0:\u0665", "\u0660:5", "0:5 1k:\xb2", "0:5\u2003\u0669:6", "0:5 2\u212a:6"]
)
def test_digits_are_those_of_ascii(text):
    with pytest.raises(ValueError, match=r"^stages\[\d\], the (start|batch size), must be a whole"):
        lb.batch_plan(text, total=100_000)


@pytest.mark.parametrize(
    ("value", "error"),
    [*((x, TypeError) for x in (None, "2M", {}, 1j, True, np.asarray(True))),
     *((x, ValueError) for x in (-1, np.int8(-1), np.asarray(-1.0), np.nan, 10**400))],
)  # fmt: skip
def test_a_planned_rate_is_called_with_numbers(value, error):
    rate = lb.PlannedRate(0.1, total=1000)
    with pytest.raises(error, match="seen must be"):
        rate(value)
    assert rate(np.inf) == rate(np.uint64(2**64 - 1)) == rate(1000) == 0


@pytest.mark.parametrize(
    ("schedule", "says"),
    [(lambda seen: seen * jnp.nan, "a number throughout"),
     (lambda seen: jnp.ones(3), r"must return one number, got the shape \(3,\)")],
)  # fmt: skip
def test_seesaw_of_a_schedule_that_is_none(schedule, says):
    with pytest.raises(ValueError, match=f"learning_rate.*{says}"):
        lb.batch_plan(lb.seesaw(8, largest_batch=64), total=1000, run=tuned(learning_rate=schedule))


def test_a_decay_of_several_numbers():
    plan = lb.batch_plan(8, total=100, run=tuned(weight_decay=lambda seen: jnp.ones(3)))
    with pytest.raises(ValueError, match=r"weight_decay: the schedule must return one number"):
        plan.weight_decay(0)


@pytest.mark.parametrize("name", ["learning_rate", "weight_decay"])
def test_a_number_that_is_infinite_in_32_bits(name):
    """Every number that a plan takes is finite in it, for each law and the largest batches."""
    with pytest.raises(ValueError, match=rf"{name} must be in \[0, 1e10\], got 1e\+300"):
        tuned(**{name: 1e300})
    largest = {"learning_rate": 1e10, "weight_decay": 1e10}
    for before, total in ((1, 2**60), (2**62, 1)):
        run = tuned(batch_size=1, total=before, decay_kind="independent", **largest)
        for law in sorted(LAWS.keys() - {"legew"}):
            plan = lb.batch_plan(2**31 - 1, total=total, run=run, law=law)
            assert np.isfinite(getattr(plan, name)(0)), law
            assert "inf" not in str(plan)
    with pytest.raises(ValueError, match=rf"{name}: what the schedule returns must be at most 3.4"):
        str(lb.batch_plan(8, total=100, run=tuned(**{name: lambda seen: 1e300})))


def test_a_rate_of_a_plan_that_is_not_finite():
    run = tuned(learning_rate=lambda seen: jnp.where(seen < 50, 0.1, jnp.nan))
    assert "The learning rate is nan at step 7." in str(lb.batch_plan(8, total=1000, run=run))


NO_PLANS = json.loads(Path(__file__).with_name("no_plans.json").read_text())
NO_PLANS |= {"lists in lists": "[" * 100_000, "an integer of many digits": "9" * 10_000}
"""What differs from a plan as it was written; or the whole text."""


@pytest.mark.parametrize("name", NO_PLANS)
def test_json_that_is_no_plan(name):
    change = NO_PLANS[name]
    text = json.dumps(READ | change) if isinstance(change, dict) else change
    with pytest.raises((TypeError, ValueError), match=r" must (be|have|begin)") as caught:
        lb.BatchPlan.from_json(text)
    assert type(caught.value) in (TypeError, ValueError)


def test_json_of_floats_that_are_whole_is_a_plan():
    changes = {"total_steps": float(READ["total_steps"]), "devices": 1.0, "examples": 1e3}
    found = lb.BatchPlan.from_json(json.dumps(READ | changes))
    assert found == PLAN
    assert found.to_json() == PLAN.to_json()
