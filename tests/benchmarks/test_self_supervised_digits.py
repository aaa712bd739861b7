"""The comparison of the guide: a short run, and what is committed."""

import functools
from pathlib import Path
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import self_supervised_digits as digits
from benchmarks.harness.pages import with_table
from benchmarks.harness.results import read

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "benchmarks" / "results" / "cpu-2-cores"
GUIDE = ROOT / "docs" / "details" / "self_supervised_digits.md"


def test_the_guide_has_the_committed_table():
    rows = read(COMMITTED / f"{digits.NAME}.csv", digits.Row)
    text = GUIDE.read_text()
    assert with_table(text, "digits", f"benchmarks.{digits.NAME}", digits.table(rows)) == text
    assert {row.batch_size for row in rows} == set(digits.BATCH_SIZES)


def test_views_are_of_the_same_image():
    """Not the image itself, and nearer to it than to another."""
    pixels = digits.images().train[0][:64]
    views = digits.augmented(jax.random.key(0), pixels)
    assert views.shape == pixels.shape
    own = jnp.mean((views - pixels) ** 2)
    other = jnp.mean((views - jnp.roll(pixels, 1, axis=0)) ** 2)
    assert 0.01 < own < 0.7 * other


def test_the_loss_is_zero_for_equal_views_of_uncorrelated_features(monkeypatch):
    """Rows of a Hadamard matrix as features: alike in both views, and not redundant."""
    monkeypatch.setattr(digits, "augmented", lambda key, pixels: pixels)
    monkeypatch.setattr(digits, "projected", lambda params, features: features)
    monkeypatch.setattr(digits, "encoded", lambda params, pixels: pixels)
    square = jnp.asarray([[1.0, 1], [1, -1]])
    features = jnp.kron(square, square)
    assert digits.loss({}, jax.random.key(0), features) == 0
    assert digits.loss({}, jax.random.key(0), jnp.abs(features)) > 0


@pytest.mark.parametrize(
    ("peak", "best", "count"), [(5.0, 4.0, 3), (60.0, 64.0, 5), (0.3, 0.25, 5), (1e9, 4096.0, 7)]
)
def test_the_grid_grows_until_the_best_is_within(peak, best, count):
    """The grid of LARS begins with 1, 4 and 16; a rate out of reach is not looked for for ever."""
    tried = []

    def run(rate, seeds):
        tried.append(float(rate))
        return jnp.full((len(seeds), 2), -jnp.abs(jnp.log(rate / peak)))

    assert digits.tuned(run, digits.ARMS["LARS, rate tuned"], 1) == best
    assert len(tried) == len(set(tried)) == count


@pytest.mark.slow
@pytest.mark.nightly
def test_a_short_run_learns_and_writes_what_is_committed(tmp_path):
    """With AdamW, in a few epochs, the features become better than untrained ones."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        given = digits.images()
        run = digits.trained(digits.ARMS["AdamW, rate tuned"], 64, 20, given)
        trained = run(jnp.asarray(0.01), jnp.arange(5))[:, 1].mean()
        starts = [digits.initial(jax.random.key(seed)) for seed in range(5)]
        untrained = [
            digits.probed(functools.partial(digits.encoded, params), given)[1] for params in starts
        ]
    assert trained > np.mean(untrained) + 0.02
    command = [sys.executable, "-m", f"benchmarks.{digits.NAME}", "--output", str(tmp_path)]
    options = ["--epochs", "11", "--seeds", "1", "--batch-sizes", "1024"]
    subprocess.run([*command, *options], cwd=ROOT, check=True, timeout=300)
    rows, committed = (
        read(folder / f"{digits.NAME}.csv", digits.Row) for folder in (tmp_path, COMMITTED)
    )
    assert {row.line for row in rows} == {row.line for row in committed}
    assert all(0.3 < row.accuracy <= 1 for row in rows)
