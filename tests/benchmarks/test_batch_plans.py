"""Seesaw ends where the constant batch ends, on a quadratic whose expected loss is exact."""

import itertools
from pathlib import Path
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import batch_plans
from benchmarks.batch_plans import CURVATURES, NOISE
from benchmarks.harness.results import read
import optax_largebatch as lb

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "benchmarks" / "results" / "batch_plans.csv"
PAGE = ROOT / "docs" / "guides" / "choosing_a_batch_size.md"
ROWS = read(COMMITTED, batch_plans.Row)
BELOW = [row for row in ROWS if row.largest_batch < row.critical_batch_size / 2]


def run(row, stages, coupling=None):
    """Steps and loss at the end of the plan with the committed peak rate."""
    plan = lb.batch_plan(
        stages,
        total=batch_plans.EXAMPLES,
        learning_rate=lb.PlannedRate(row.peak_rate, total=batch_plans.EXAMPLES, decay=row.decay),
        coupling=coupling or batch_plans.COUPLINGS[row.optimizer],
    )
    (loss,) = batch_plans.final_losses([plan], row.optimizer == "normalised SGD")
    return plan.total_steps, loss


def both(row, coupling=None):
    """The constant batch and Seesaw."""
    growth = lb.seesaw(row.batch_size, largest_batch=row.largest_batch)
    return run(row, row.batch_size), run(row, growth, coupling)


def name(row):
    return f"{row.optimizer}-{row.decay}-{row.batch_size}"


@pytest.mark.parametrize("row", BELOW, ids=name)
class TestBelowTheCriticalBatch:
    def test_seesaw_ends_within_a_hundredth_in_seven_tenths_of_the_steps(self, row):
        (steps, loss), (seesaw_steps, seesaw_loss) = both(row)
        assert abs(seesaw_loss / loss - 1) < 0.01
        assert seesaw_steps <= 0.7 * steps

    def test_another_coupling_ends_elsewhere(self, row):
        for coupling in {"sqrt", "linear"} - {batch_plans.COUPLINGS[row.optimizer]}:
            (_, loss), (_, seesaw_loss) = both(row, coupling)
            assert abs(seesaw_loss / loss - 1) > 0.01

    def test_the_file_has_these_numbers(self, row):
        (steps, loss), (seesaw_steps, seesaw_loss) = both(row)
        assert (row.steps, row.seesaw_steps) == (steps, seesaw_steps)
        np.testing.assert_allclose([row.loss, row.seesaw_loss], [loss, seesaw_loss], rtol=1e-4)


def test_has_every_row_and_no_best_rate_is_at_an_edge_below_the_critical_batch():
    own = [(row.optimizer, row.decay, row.batch_size) for row in ROWS]
    assert own == list(
        itertools.product(batch_plans.COUPLINGS, batch_plans.DECAYS, batch_plans.BATCH_SIZES)
    )
    assert len(BELOW) == 8
    peaks = {row.peak_rate for row in BELOW}
    assert min(batch_plans.PEAKS) < min(peaks) < max(peaks) < max(batch_plans.PEAKS)


@pytest.mark.parametrize("normalised", [False, True])
def test_the_loss_is_the_mean_of_sampled_runs(normalised):
    rate, batch_size, steps = 0.3, 16, 40
    plan = lb.batch_plan(batch_size, total=batch_size * steps, learning_rate=rate)
    (loss,) = batch_plans.final_losses([plan], normalised)
    random = np.random.default_rng(0)
    weights = np.ones((4000, len(CURVATURES)))
    for _ in range(steps):
        noise = np.sqrt(NOISE * CURVATURES / batch_size) * random.standard_normal(weights.shape)
        gradients = CURVATURES * weights + noise
        size = np.sqrt((gradients**2).sum(axis=1).mean()) if normalised else 1
        weights -= rate * gradients / size
    np.testing.assert_allclose(loss, 0.5 * (weights**2 @ CURVATURES).mean(), rtol=0.01)


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
    np.testing.assert_allclose(batch_plans.least_examples(target), examples, rtol=0.05)


class TestGuide:
    """The sentences of the page are true of the file."""

    page = " ".join(PAGE.read_text().split())

    def of(self, times_critical, optimizer):
        """How much higher Seesaw, Seesaw at its own best rate, and as many steps end."""
        own = [
            row
            for row in ROWS
            if row.optimizer == optimizer
            and round(row.largest_batch / row.critical_batch_size) == times_critical
        ]
        assert [row.decay for row in own] == ["linear", "cosine"]
        return np.array(
            [[row.seesaw_loss, row.seesaw_best_loss, row.same_steps_loss] for row in own]
        ) / [[row.loss] for row in own]

    def test_below(self):
        shares = [row.seesaw_steps / row.steps for row in BELOW]
        few, many = 100 * min(shares), 100 * max(shares)
        assert f"in {few:.0f} to {many:.0f}% of the steps" in self.page
        most = max(row.same_steps_loss / row.loss - 1 for row in BELOW)
        assert f"A constant batch in as many steps ends within {most:.1%}." in self.page

    def test_near(self):
        seesaw, _, same_steps = self.of(1, "normalised SGD").T - 1
        assert f"it ends {seesaw.max():.1%} higher at most" in self.page
        assert f"in as many steps ends {same_steps.min():.0%} higher or more" in self.page

    def test_sgd_diverges(self):
        diverged, _, _ = self.of(1, "SGD").T
        assert np.isinf(diverged).all()
        peaks = {row.peak_rate for row in ROWS if row.optimizer == "SGD" and row.batch_size == 256}
        assert f"Its best rate, {peaks.pop():.1f}, is above 2, the largest" in self.page
        assert not peaks
        assert CURVATURES.max() == 1

    def test_above(self):
        best = np.concatenate([self.of(4, name)[:, 1] for name in batch_plans.COUPLINGS])
        assert f"it ends at {best.min():.1f} to {best.max():.1f} times the loss" in self.page


@pytest.mark.slow
@pytest.mark.nightly
def test_the_script_writes_the_committed_file(tmp_path):
    command = [sys.executable, "-m", "benchmarks.batch_plans", "--output", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600)
    assert (tmp_path / COMMITTED.name).read_bytes() == COMMITTED.read_bytes()
