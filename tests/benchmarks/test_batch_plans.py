"""Seesaw ends where the constant batch ends, on a quadratic whose expected loss is exact."""

import itertools
from pathlib import Path
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import batch_plans
from benchmarks.batch_size_curve.quadratic import CURVATURES, NOISE, expected_losses
import optax_largebatch as lb

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "benchmarks" / "results" / "batch_plans.csv"
ROWS = batch_plans.read(COMMITTED)
BELOW = [row for row in ROWS if row.largest_batch < row.critical_batch_size / 2]


def run(row, stages, coupling=None):
    """Steps and loss at the end of the plan with the committed peak rate."""
    plan = lb.batch_plan(
        stages,
        batch_plans.EXAMPLES,
        learning_rate=lb.PlannedRate(row.peak_rate, batch_plans.EXAMPLES, decay=row.decay),
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
        for coupling in {"sqrt", "linear", "none"} - {batch_plans.COUPLINGS[row.optimizer]}:
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


def test_a_constant_rate_has_the_losses_of_the_other_workload():
    plan = lb.batch_plan(8, 800, learning_rate=0.1, coupling="linear")
    (loss,) = batch_plans.final_losses([plan], normalised=False)
    losses = expected_losses(0.1, 0.0, 8)
    np.testing.assert_allclose(loss, list(itertools.islice(losses, 100))[-1], rtol=1e-6)


def test_the_normalised_loss_is_the_mean_of_sampled_runs():
    rate, batch_size, steps = 0.3, 16, 40
    plan = lb.batch_plan(batch_size, batch_size * steps, learning_rate=rate)
    (loss,) = batch_plans.final_losses([plan], normalised=True)
    random = np.random.default_rng(0)
    weights = np.ones((4000, len(CURVATURES)))
    for _ in range(steps):
        noise = np.sqrt(NOISE * CURVATURES / batch_size) * random.standard_normal(weights.shape)
        gradients = CURVATURES * weights + noise
        weights -= rate * gradients / np.sqrt((gradients**2).sum(axis=1).mean())
    np.testing.assert_allclose(loss, 0.5 * (weights**2 @ CURVATURES).mean(), rtol=0.01)


@pytest.mark.slow
def test_the_script_writes_the_committed_file(tmp_path):
    command = [sys.executable, "-m", "benchmarks.batch_plans", "--output", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600)
    assert (tmp_path / COMMITTED.name).read_bytes() == COMMITTED.read_bytes()
