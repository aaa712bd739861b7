"""Seesaw ends where the constant batch ends, on a quadratic whose expected loss is exact."""

import itertools
import subprocess
import sys

import numpy as np
from numpy.testing import assert_allclose
import pytest

from benchmarks import batch_plans
from benchmarks.batch_plans import CURVATURES, NOISE
from benchmarks.harness.results import read
import optax_largebatch as lb
from tests.size import ROOT

COMMITTED = ROOT / "benchmarks" / "results" / "batch_plans.csv"
PAGE = ROOT / "docs" / "guides" / "choosing_a_batch_size.md"
ROWS = read(COMMITTED, batch_plans.Row)
BELOW = [row for row in ROWS if row.largest_batch < row.critical_batch_size / 2]


def run(row, stages, law=None):
    """Steps and loss at the end of the plan with the committed peak rate."""
    plan = lb.batch_plan(
        stages,
        total=batch_plans.EXAMPLES,
        run=lb.TunedRun(
            "sgd",
            batch_size=row.batch_size,
            total=batch_plans.EXAMPLES,
            learning_rate=lb.PlannedRate(row.peak_rate, decay=row.decay),
        ),
        law=law or batch_plans.LAWS[row.optimizer],
    )
    (loss,) = batch_plans.final_losses([plan], row.optimizer == "normalised SGD")
    return plan.total_steps, loss


def both(row, law=None):
    """The constant batch and Seesaw."""
    growth = lb.seesaw(row.batch_size, largest_batch=row.largest_batch)
    return run(row, row.batch_size), run(row, growth, law)


def name(row):
    return f"{row.optimizer}-{row.decay}-{row.batch_size}"


@pytest.mark.parametrize("row", BELOW, ids=name)
def test_below_the_critical_batch(row):
    """Seesaw ends within a hundredth in seven tenths of the steps; other laws do not."""
    (steps, loss), (seesaw_steps, seesaw_loss) = both(row)
    assert abs(seesaw_loss / loss - 1) < 0.01
    assert seesaw_steps <= 0.7 * steps
    assert (row.steps, row.seesaw_steps) == (steps, seesaw_steps)
    assert_allclose([row.loss, row.seesaw_loss], [loss, seesaw_loss], rtol=1e-4)
    for law in {"sqrt", "sgd"} - {batch_plans.LAWS[row.optimizer]}:
        (_, loss), (_, seesaw_loss) = both(row, law)
        assert abs(seesaw_loss / loss - 1) > 0.01


def test_has_every_row_and_no_best_rate_is_at_an_edge_below_the_critical_batch():
    own = [(row.optimizer, row.decay, row.batch_size) for row in ROWS]
    assert own == list(
        itertools.product(batch_plans.LAWS, batch_plans.DECAYS, batch_plans.BATCH_SIZES)
    )
    assert len(BELOW) == 8
    peaks = {row.peak_rate for row in BELOW}
    assert min(batch_plans.PEAKS) < min(peaks) < max(peaks) < max(batch_plans.PEAKS)


@pytest.mark.parametrize("normalised", [False, True])
def test_the_loss_is_the_mean_of_sampled_runs(normalised):
    rate, batch_size, steps = 0.3, 16, 40
    plan = lb.batch_plan(
        batch_size,
        total=batch_size * steps,
        run=lb.TunedRun("sgd", batch_size=batch_size, total=batch_size * steps, learning_rate=rate),
    )
    (loss,) = batch_plans.final_losses([plan], normalised)
    random = np.random.default_rng(0)
    weights = np.ones((4000, len(CURVATURES)))
    for _ in range(steps):
        noise = np.sqrt(NOISE * CURVATURES / batch_size) * random.standard_normal(weights.shape)
        gradients = CURVATURES * weights + noise
        size = np.sqrt((gradients**2).sum(axis=1).mean()) if normalised else 1
        weights -= rate * gradients / size
    assert_allclose(loss, 0.5 * (weights**2 @ CURVATURES).mean(), rtol=0.01)


def test_the_limits_of_the_curve_are_those_of_simulated_sgd():
    """Steps at a huge batch and examples at a tiny one, each at the best of many rates."""

    def steps(rate, batch_size, target):
        squares, count = np.ones_like(CURVATURES), 0
        while 0.5 * squares @ CURVATURES > target:
            variance = NOISE * CURVATURES / batch_size
            squares = (1 - rate * CURVATURES) ** 2 * squares + rate**2 * variance
            count += 1
            if count > 20_000:
                return np.inf
        return count

    target = 0.1 * batch_plans.START
    most = min(steps(rate, 1e9, target) for rate in np.linspace(1.1, 1.95, 18))
    assert most - 1 < batch_plans.least_steps(target) <= most
    examples = min(steps(rate, 0.1, target) for rate in np.geomspace(0.001, 0.01, 15)) * 0.1
    assert_allclose(batch_plans.least_examples(target), examples, rtol=0.05)


def over_the_constant(times_critical, optimizer):
    """How much higher Seesaw, Seesaw at its own best rate, and as many steps end, by decay."""
    own = [
        row
        for row in ROWS
        if row.optimizer == optimizer
        and round(row.largest_batch / row.critical_batch_size) == times_critical
    ]
    losses = [[row.seesaw_loss, row.seesaw_best_loss, row.same_steps_loss] for row in own]
    return (np.array(losses) / [[row.loss] for row in own]).T


def test_the_numbers_of_the_guide():
    shares = [100 * row.seesaw_steps / row.steps for row in BELOW]
    in_as_many = max(row.same_steps_loss / row.loss - 1 for row in BELOW)
    near, _, near_in_as_many = over_the_constant(1, "normalised SGD") - 1
    assert np.isinf(over_the_constant(1, "SGD")[0]).all()
    (peak,) = {row.peak_rate for row in ROWS if (row.optimizer, row.batch_size) == ("SGD", 256)}
    above = np.concatenate([over_the_constant(4, name)[1] for name in batch_plans.LAWS])
    page = " ".join(PAGE.read_text().split())
    for said in (
        f"in {min(shares):.0f} to {max(shares):.0f}% of the steps",
        f"within {in_as_many:.1%}.",
        f"{near.max():.1%} higher at most",
        f"{near_in_as_many.min():.0%} higher or more",
        f"{peak:.1f}, is above 2",
        f"{above.min():.1f} to {above.max():.1f} times the loss",
    ):
        assert said in page


@pytest.mark.slow
@pytest.mark.nightly
def test_the_script_writes_the_committed_file(tmp_path):
    command = [sys.executable, "-m", "benchmarks.batch_plans", "--output", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600)
    assert (tmp_path / COMMITTED.name).read_bytes() == COMMITTED.read_bytes()
