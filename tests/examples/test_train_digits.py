"""The example on handwritten digits, run as a user runs it but for a few steps."""

import csv
import itertools
import math
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
from PIL import Image, ImageColor
import pytest

import comparison
import digits
import optax_largebatch as lb
from tests.conftest import slow_but
from tests.size import ROOT
import train_digits
import tune_digits

pytestmark = pytest.mark.usefixtures("standard_promotion")


def options(text, output):
    return [*text.split(), "--output", str(output)]


COMPARED = ("adamw", "lamb", "lans", "muonh")
SHORT = "--optimizer adamw lamb --batch-size 64 --seeds 2 --epochs 1 --target 0.2"


OTHERS = ("adamw", "lans", "muonh", "lars", "larc", "lbsgd")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A short comparison, its folder and what it printed."""
    output = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        lines = []
        patch.setattr("builtins.print", lambda *parts: lines.append(" ".join(parts)))
        results = train_digits.main(options(SHORT, output))
    return results, output, "\n".join(lines)


@pytest.mark.parametrize("optimizer", slow_but(("lamb",), ["lamb", *OTHERS]))
def test_loss_falls(optimizer, tmp_path):
    chosen = f"--optimizer {optimizer} --batch-size 64 --seeds 1 --epochs 1.5"
    (result,) = train_digits.main(options(chosen, tmp_path))
    assert len(result.losses) == result.steps == 28
    assert result.losses[-4:].mean() < 0.9 * result.losses[:2].mean()


@pytest.mark.slow
def test_macrobatch_is_a_large_batch(tmp_path):
    """Four batches of 32 make the step that one batch of 128 makes."""
    chosen = "--optimizer lamb --seeds 1 --epochs 0.5 --learning-rate 0.05"
    micro = f"{chosen} --batch-size 32 --micro-batches 4"
    (macro,) = train_digits.main(options(micro, tmp_path / "macro"))
    (large,) = train_digits.main(options(f"{chosen} --batch-size 128", tmp_path / "large"))
    assert (macro.batch, large.batch, macro.steps) == ("4x32", "128", large.steps)
    of_steps = macro.losses.reshape(large.steps, 4).mean(axis=1)
    assert_allclose(of_steps, large.losses, rtol=1e-5)
    assert macro.trust_ratio == pytest.approx(large.trust_ratio, rel=1e-4)


def test_lbsgd_scales_its_learning_rate_to_the_macrobatch():
    """An epoch has 10 micro-batches, the warm-up 50, and the first step comes with the fourth."""
    optimizer = train_digits.build_optimizer("lbsgd", 0.1, 0.9, 0.0, 4, epoch=2.5, steps=100)
    params = {"kernel": jnp.full(4, 2.0), "bias": jnp.full(4, 2.0), "scale": jnp.full(4, 2.0)}
    grads = jax.tree.map(jnp.ones_like, params)
    state = optimizer.init(params)
    for _ in range(4):
        updates, state = optimizer.update(grads, state, params)
    assert_allclose(updates["kernel"], -0.1 * (1 + 3 * 4 / 50), rtol=1e-6)


@pytest.mark.parametrize("optimizer", COMPARED)
def test_rates_are_the_best_of_the_committed_trials(optimizer):
    rows = tune_digits.read(ROOT / "benchmarks/results/cpu-2-cores/digits_rates.csv")
    for batch, rate in zip((32, 1024), digits.DEFAULTS[optimizer], strict=False):
        cell = optimizer, str(batch)
        own = [row for row in rows if (row["optimizer"], row["batch_size"]) == cell]
        trials = [(float(row["learning_rate"]), int(row["seed"])) for row in own]
        assert trials == [*itertools.product(tune_digits.RATES, tune_digits.SEEDS)]
        assert tune_digits.best_rate(own) == rate


def test_parts_of_the_data_are_disjoint_and_balanced():
    data = digits.load_data()
    images = np.concatenate([part.images.reshape(len(part.labels), -1) for part in data])
    original = digits.load_digits().data / 16
    assert_array_equal(*(np.sort(x, axis=0) for x in (images, original)))
    assert [len(part.labels) for part in data] == [1197, 300, 300]
    for part in data:
        shares = np.bincount(part.labels) / len(part.labels)
        assert_allclose(shares, 0.1, atol=0.005)


@pytest.mark.slow
def test_a_comparison_leaves_rows_a_picture_and_words(finished):
    results, output, printed = finished
    adamw, second, lamb, _ = results
    assert not np.array_equal(adamw.losses, second.losses)
    assert adamw.losses[0] == lamb.losses[0]  # the same network on the same examples
    with (output / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert " ".join(row["optimizer"] + row["seed"] for row in rows) == "adamw0 adamw1 lamb0 lamb1"
    for row, result in zip(rows, results, strict=True):
        assert float(row["test_accuracy"]) == result.test_accuracy
        assert row["steps_to_target"] == comparison.in_words(result.steps_to_target)
        assert math.isnan(float(row["trust_ratio"])) == (result.optimizer == "adamw")
    assert comparison.table(results) in printed
    assert comparison.verdict(results) in printed
    assert str(output / "curves.png") in printed.splitlines()[-1]
    with Image.open(output / "curves.png") as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(maxcolors=2**24)}
        assert min(image.size) > 800
    drawn, other = lb.plots.COLOURS[:2], lb.plots.COLOURS[2]
    assert {*map(ImageColor.getrgb, drawn)} <= colours
    assert ImageColor.getrgb(other) not in colours


def runs(optimizer, *reached):
    """A run for each seed that reached the target after so many steps."""
    return [
        comparison.Result(
            optimizer, "32", seed, 0.1, 2, 4, steps, 0.9 + seed / 100, 0.5, np.arange(4.0)
        )
        for seed, steps in enumerate(reached)
    ]


def test_table_has_medians_and_ranges():
    results = runs("adamw", 24, 29, math.inf, 23, 30) + runs("lamb", math.inf, 30, math.inf)
    header, adamw, lamb = (line.split() for line in comparison.table(results).splitlines())
    assert header[:2] == ["optimizer", "batch"]
    assert " ".join(adamw) == "adamw 32 0.1 4 29 (23 to never) 0.920 (0.900 to 0.940)"
    assert " ".join(lamb) == "lamb 32 0.1 4 never (30 to never) 0.910 (0.900 to 0.920)"


@pytest.mark.parametrize(
    ("adamw", "lamb", "sentence"),
    [
        ((23, 25), (26, 40), "adamw took the fewest steps, 24 in the median, and even"),
        ((23, 25), (25, 40), "24 in the median, but the range of lamb overlaps"),
        ((23, 25), (20, 21), "lamb took the fewest steps, 20.5 in the median, and even"),
        ((math.inf,), (math.inf,), "no optimizer reached the target"),
    ],
)
def test_verdict_says_whether_the_seeds_tell(adamw, lamb, sentence):
    assert sentence in comparison.verdict(runs("adamw", *adamw) + runs("lamb", *lamb))


@pytest.mark.parametrize(
    ("text", "argument", "got"),
    [
        ("--optimizer lamb adam", "--optimizer", "'adam'"),
        ("--batch-size 32 0", "--batch-size", "'0'"),
        ("--target 95", "--target", "'95'"),
    ],
)
def test_wrong_arguments_are_named(text, argument, got, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        train_digits.main(options(text, tmp_path))
    assert re.search(f"argument {argument}: .*{got}.*$", capsys.readouterr().err)


def test_a_batch_larger_than_the_data(tmp_path):
    with pytest.raises(SystemExit, match=r"at most 1197, the training examples; got 2048"):
        train_digits.main(options("--batch-size 1024 --micro-batches 2", tmp_path))
    assert not (tmp_path / "results.csv").exists()


@pytest.mark.slow
@pytest.mark.nightly
def test_the_readme_has_what_the_demo_prints(tmp_path):
    """On one device, as readers run it: rounding decides single steps."""
    demo = subprocess.run(
        [sys.executable, ROOT / "examples" / "train_digits.py"],
        cwd=tmp_path,
        env={name: x for name, x in os.environ.items() if name not in ("XLA_FLAGS", "NPROC")},
        capture_output=True,
        text=True,
        check=True,
    )
    line = r"^ +(\w+) +(\d+) +[\d.]+ +\d+ +(\d+ \(\d+ to \d+\)) +([\d.]+) \("
    rows = {row[:2]: row[2:] for row in re.findall(line, demo.stdout, re.MULTILINE)}
    table = (ROOT / "README.md").read_text().partition("<!-- demo -->")[2]
    shown = re.findall(r"^\| `(?:optax\.)?(\w+)` \| (.*) \|$", table, re.MULTILINE)
    assert len(shown) == 4
    for name, cells in shown:
        small, large = rows[name, "32"], rows[name, "1024"]
        assert cells.split(" | ") == [small[0], *large], name
