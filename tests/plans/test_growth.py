"""Batches that grow by a rule."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_largebatch as lb
from tests.plans.runs import tuned


def sizes(plan):
    return [stage.batch_size for stage in plan.stages]


def seesaw(rate, batch_size, largest_batch, total, **settings):
    """A plan that is as long as the run with its first batch."""
    growth = lb.seesaw(batch_size, largest_batch=largest_batch)
    return lb.batch_plan(growth, total=total, run=tuned(rate, batch_size, total), **settings)


@pytest.mark.parametrize("decay", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 100_000])
def test_seesaw_doubles_where_the_schedule_halves(decay, warmup):
    rate = lb.PlannedRate(0.4, total=1_000_000, warmup=warmup, decay=decay)
    plan = seesaw(rate, 10, 85, "1M")
    assert sizes(plan) == [10, 20, 40, 80]
    for j, stage in enumerate(plan.stages[1:], start=1):
        before, after = (float(rate(stage.first_example - back)) for back in (40, 0))
        assert after <= 0.4 / 2**j * (1 + 1e-4)
        assert before > 0.4 / 2**j * (1 - 1e-4)
        # The rate has fallen by the root of 2 for each halving; the batch has doubled.
        assert float(plan.learning_rate(stage.first_step)) == pytest.approx(
            0.4 / 2 ** (j / 2), rel=1e-3
        )


def test_seesaw_of_stairs():
    """The rate falls to a tenth at once: three doublings in one place."""
    stairs = optax.piecewise_constant_schedule(1.0, {500: 0.1, 800: 0.1})
    assert [stage[1:] for stage in seesaw(stairs, 1, 64, 1000).stages] == [
        (0, 1), (500, 8), (804, 64),
    ]  # fmt: skip


def test_seesaw_without_a_fall():
    assert sizes(seesaw(lb.PlannedRate(1.0, end_value=0.6), 8, 64, 1000)) == [8]


def test_seesaw_with_tokens():
    rate = lb.PlannedRate(1.0, decay="linear")
    plan = seesaw(rate, 1024, 4096, "1T", sequence_length=4096)
    halves = [stage.first_example * 4096 for stage in plan.stages[1:]]
    np.testing.assert_allclose(halves, [5e11, 7.5e11], rtol=1e-4)


def test_seesaw_after_a_short_warmup():
    """The peak lies between two of the points that are looked at first."""
    plan = seesaw(lb.PlannedRate(1.0, warmup=100, decay="linear"), 1, 2, "2M")
    assert plan.stages[1].first_example == pytest.approx(1_000_050, abs=3)


def test_seesaw_needs_a_rate_that_follows():
    with pytest.raises(ValueError, match="law must move the learning rate with the batch"):
        seesaw(lb.PlannedRate(1.0), 1, 2, "2M", law="kept")
    with pytest.raises(ValueError, match="above 0 somewhere"):
        seesaw(lambda seen: 0 * seen, 1, 2, "2M")


def test_seesaw_needs_a_schedule():
    for run in (None, tuned(0.1, 8, 1000)):
        with pytest.raises(ValueError, match="must be a schedule of the examples seen for seesaw"):
            lb.batch_plan(lb.seesaw(8, largest_batch=64), total=1000, run=run)


def test_seesaw_refuses_a_largest_batch_below_the_first():
    with pytest.raises(ValueError, match="largest_batch must be >= 64"):
        lb.seesaw(64, largest_batch=32)


def fitted(critical):
    batches = [64, 256, 1024, 4096]
    return lb.fit_critical_batch_size(batches, [100 * (1 + critical / b) for b in batches])


def within(measured, largest_batch=10**6, batch_size=100, **settings):
    growth = lb.within_critical_batch_size(
        measured, batch_size=batch_size, largest_batch=largest_batch, **settings
    )
    return lb.batch_plan(growth, total=20_000)


def test_within_what_was_measured():
    plan = within({"1k": fitted(300.0), "4k": 500, "9k": fitted(1100.0)}, largest_batch=700)
    # 100, at most 300: 200; 500: 400; 1100, but at most 700: 400 still.
    assert [stage[1:] for stage in plan.stages] == [(0, 100), (1000, 200), (4000, 400)]
    assert "measured at 3 places" in plan.note
    assert "hint" not in plan.note


def test_above_the_critical_batch_and_never_back():
    measured = {0: 150.0, 1000: 401, 2000: 90}
    assert sizes(within(measured)) == [100, 400]
    assert sizes(within(measured, times=2)) == [200, 800]


def test_places_at_the_end_and_without_bound():
    assert sizes(within({0: float("inf"), 20_000: 10**6}, 800)) == [800]
    assert sizes(within({20_000: 10**6}, 800)) == [100]
    for tiny in ({0: 1e-320}, {0: 1e-320, 10: 5.0}):
        assert sizes(within(tiny, times=1e-9)) == [100]


def test_a_noise_scale_is_labelled_as_a_hint():
    noise = lb.NoiseScale(*map(jnp.asarray, (500.0, 250.0, 1000.0, 1.0, 1.0)))
    plan = within({1000: noise}, 256, batch_size=64)
    assert sizes(plan) == [64, 256]
    assert "hint" in str(plan)


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        ({}, "at least|must be a dict"),
        ([100], "a dict"),
        ({5: -1.0}, "measured"),
        ({-5: 1}, ">= 0"),
    ],
)
def test_refuses(measured, words):
    with pytest.raises((TypeError, ValueError), match=words):
        within(measured)
