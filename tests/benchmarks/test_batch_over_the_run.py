"""The runs of a small BERT whose batch grows: what is committed, and a short run."""

from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import batch_over_the_run as grown
from benchmarks.harness.pages import with_table
from benchmarks.harness.results import read
from benchmarks.tuned.bert import SMALL, Bert

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "benchmarks" / "results" / "cpu-2-cores"
PAGE = ROOT / "docs" / "guides" / "choosing_a_batch_size.md"
ROWS = read(COMMITTED / f"{grown.NAME}.csv", grown.Row)


def test_the_page_has_the_committed_table():
    text, table = PAGE.read_text(), grown.table(ROWS)
    wrong = text.replace(table, "")
    assert wrong != text
    assert with_table(wrong, grown.NAME, f"benchmarks.{grown.NAME}", table) == text


def test_the_committed_runs_took_the_steps_of_their_plans():
    assert len(grown.at_the_end(ROWS)) == len(grown.STAGES) * len(grown.SEEDS)
    for row in grown.at_the_end(ROWS):
        plan = grown.planned(row.plan)
        assert row.step == plan.total_steps
        assert row.examples == plan.examples_at(plan.total_steps) >= grown.EXAMPLES


def test_the_numbers_of_the_page():
    page = " ".join(PAGE.read_text().split())
    losses = {
        name: np.array([row.test_loss for row in grown.at_the_end(ROWS) if row.plan == name])
        for name in grown.STAGES
    }
    steps = {name: grown.planned(name).total_steps for name in grown.STAGES}
    more = losses["Seesaw"].mean() / losses["constant"].mean() - 1
    saved = 1 - steps["Seesaw"] / steps["constant"]
    assert f"saved {saved:.0%} of the steps for {more:.1%} of the loss" in page
    assert (losses["Seesaw"] > losses["constant"]).all()
    assert steps["ramp"] < steps["twice the constant"] < steps["Seesaw"]
    assert (losses["ramp"] < losses["twice the constant"]).sum() == 4
    assert {row.peak_rate for row in ROWS} <= set(grown.PEAKS[1:-1])


def test_a_page_without_the_place_is_refused():
    with pytest.raises(ValueError, match="must have one '<!-- here: made by a_script -->'"):
        with_table("# A page\n", "here", "a_script", "| |")


@pytest.mark.slow
@pytest.mark.nightly
def test_a_short_run_learns_as_its_plan_says(monkeypatch, tmp_path):
    monkeypatch.setattr(grown, "EXAMPLES", 128 * grown.MICRO_BATCH)
    monkeypatch.setattr(grown, "WARMUP", 8 * grown.MICRO_BATCH)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        task = Bert(SMALL, held_out=512)
        rows = [
            row for name in ("constant", "Seesaw") for row in grown.trained(task, name, [0.01], [0])
        ]
    constant, seesaw = grown.at_the_end(rows)
    assert constant.step == 128
    # The examples end inside the last batch of this short plan.
    assert seesaw.step == grown.planned("Seesaw").total_steps - 1 < 0.75 * constant.step
    first = min(rows, key=lambda row: row.step)
    assert max(constant.test_loss, seesaw.test_loss) < first.test_loss - 0.05
    np.testing.assert_allclose(seesaw.test_loss, constant.test_loss, rtol=0.05)
