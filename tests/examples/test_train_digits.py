"""The example on handwritten digits, run as a user runs it but for a few steps."""

import dataclasses
import json
import multiprocessing
from pathlib import Path
import shutil
import signal
import time

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image, ImageColor
import pytest

from examples import train_digits

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True, scope="module")
def standard_promotion():
    """The strict promotion of the other tests is too strict for `optax.adamw` and Flax."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def options(text, output):
    return [*text.split(), "--output", str(output)]


def weights(result):
    return jax.tree.leaves(nnx.state(result.model, nnx.Param))


def assert_same_run(result, expected):
    """The same to the last bit: every loss, every accuracy, every weight."""
    np.testing.assert_array_equal(result.losses, expected.losses)
    np.testing.assert_array_equal(result.accuracies, expected.accuracies)
    for weight, expected_weight in zip(weights(result), weights(expected), strict=True):
        np.testing.assert_array_equal(weight, expected_weight)


SHORT = "--optimizer lamb --batch-size 32 --steps 12 --evaluate-every 4 --checkpoint-every 5"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A short comparison that was not interrupted, and its folder."""
    output = tmp_path_factory.mktemp("finished")
    (result,) = train_digits.main(options(SHORT, output))
    return result, output


# Each optimizer with another schedule and initializer, so that all of them are run.
@pytest.mark.parametrize(
    ("optimizer", "schedule", "initializer"),
    [
        ("lamb", "steps", "he"),
        ("lars", "hold-decay", "normal"),
        *(
            pytest.param(*settings, marks=pytest.mark.slow)
            for settings in [
                ("adamw", "constant", "xavier"),
                ("lans", "polynomial", "orthogonal"),
                ("larc", "eden", "uniform"),
                ("lbsgd", "polynomial", "he"),
            ]
        ),
    ],
)
def test_loss_falls(optimizer, schedule, initializer, tmp_path):
    chosen = f"--optimizer {optimizer} --schedule {schedule} --initializer {initializer}"
    length = "--batch-size 64 --steps 16 --warmup-epochs 0"
    (result,) = train_digits.main(options(f"{chosen} {length}", tmp_path))
    assert result.losses[-4:].mean() < 0.9 * result.losses[:2].mean()


def test_macrobatch_is_a_large_batch(tmp_path):
    """Four batches of 32 make the step that one batch of 128 makes."""
    chosen = "--optimizer lamb --steps 4 --warmup-epochs 0 --learning-rate 0.05"
    macro_options = f"{chosen} --batch-size 32 --macrobatch-size 128"
    (macro,) = train_digits.main(options(macro_options, tmp_path / "macro"))
    (large,) = train_digits.main(options(f"{chosen} --batch-size 128", tmp_path / "large"))
    np.testing.assert_allclose(macro.losses, large.losses, rtol=1e-5)
    for weight, expected in zip(weights(macro), weights(large), strict=True):
        np.testing.assert_allclose(weight, expected, atol=1e-5)


@pytest.mark.parametrize(
    # An epoch has 10 micro-batches, and the first step comes with the fourth of them.
    ("strategy", "multiplier"),
    [
        ("linear", 1 + 3 * 0.4),
        ("power2", 1 + 3 * 0.4**2),
        ("sqrt", 1 + 3 * 0.4**0.5),
        ("lars", 2.0),  # the ratio of the norms of the kernel and its gradient
    ],
)
def test_lbsgd_scales_its_learning_rate_to_the_macrobatch(strategy, multiplier):
    args = train_digits.parse_arguments(
        "--optimizer lbsgd --batch-size 32 --macrobatch-size 128 --schedule constant "
        "--learning-rate 0.1 --weight-decay 0 --warmup-epochs 1 "
        f"--warmup-strategy {strategy}".split()
    )
    (run,) = train_digits.plan_runs(args, num_examples=320)
    optimizer = train_digits.build_optimizer(run, args)
    params = {"kernel": jnp.full(4, 2.0), "bias": jnp.full(4, 2.0), "scale": jnp.full(4, 2.0)}
    grads = jax.tree.map(jnp.ones_like, params)
    state = optimizer.init(params)
    for _ in range(4):
        updates, state = optimizer.update(grads, state, params)
    np.testing.assert_allclose(updates["kernel"], -0.1 * multiplier, rtol=1e-6)


PEAK = "--optimizer lamb --batch-size 100 --steps 100 --learning-rate 1 --warmup-epochs 1"


@pytest.mark.parametrize(
    ("chosen", "rates"),
    [
        ("--schedule constant", {10: 1, 55: 1, 99: 1}),
        ("--schedule steps", {10: 1, 54: 1, 56: 0.1, 76: 0.1, 78: 0.01}),
        ("--schedule polynomial", {10: 1, 55: 0.5, 100: 0}),
        ("--schedule polynomial --power 2", {10: 1, 55: 0.25, 100: 0}),
        ("--schedule hold-decay", {10: 1, 54: 1, 55: 1, 64: 0.8, 100: 0}),
        # A quarter of what is left is 22.5 steps, or 2.25 epochs of 10 steps.
        ("--schedule eden", {10: 1, 55: (1 + 2**2) ** -0.25 * (1 + (4 / 2.25) ** 2) ** -0.25}),
        ("--warmup-strategy linear", {0: 0.01, 5: 0.505, 10: 1}),
        ("--warmup-strategy power2", {0: 0.01, 5: 0.2575, 10: 1}),
        ("--warmup-strategy sqrt", {0: 0.01, 5: 0.01 + 0.99 * 0.5**0.5, 10: 1}),
    ],
)
def test_schedule(chosen, rates):
    """The warm-up takes 10 steps of the 100, the schedule the 90 after it."""
    args = train_digits.parse_arguments(f"{PEAK} {chosen}".split())
    (run,) = train_digits.plan_runs(args, num_examples=1000)
    schedule = train_digits.build_schedule(run, args)
    for step, rate in rates.items():
        assert float(schedule(step)) == pytest.approx(rate, abs=1e-6), step


def test_default_rates():
    """They are those of the table at its batch sizes, and a power of the batch between them."""
    small, large, _ = train_digits.DEFAULTS["lamb"]
    assert train_digits.default_rate("lamb", 32) == pytest.approx(small)
    assert train_digits.default_rate("lamb", 1024) == pytest.approx(large)
    middle = (32 * 1024) ** 0.5
    assert train_digits.default_rate("lamb", middle) == pytest.approx((small * large) ** 0.5)


@pytest.mark.slow
def test_float16_loses_nothing(tmp_path):
    """Its loss falls as that of float32."""
    length = "--optimizer lamb --batch-size 64 --steps 16 --warmup-epochs 0"
    (full,) = train_digits.main(options(length, tmp_path))
    (half,) = train_digits.main(options(f"{length} --dtype float16", tmp_path))
    assert all(weight.dtype == jnp.float16 for weight in weights(half))
    np.testing.assert_allclose(half.losses[-4:].mean(), full.losses[-4:].mean(), rtol=0.2)


def test_order_is_epochs_that_do_not_depend_on_the_length():
    long = train_digits.shuffled(10, 35, seed=3)
    assert sorted(long[:10]) == sorted(long[10:20]) == list(range(10))
    assert list(long[:10]) != list(long[10:20])
    np.testing.assert_array_equal(train_digits.shuffled(10, 12, seed=3), long[:12])


def test_parts_of_the_data_are_disjoint_and_balanced():
    data = train_digits.load_data()
    images = np.concatenate([part.images.reshape(len(part.labels), -1) for part in data])
    original = train_digits.load_digits().data / 16
    np.testing.assert_array_equal(*(np.sort(x, axis=0) for x in (images, original)))
    assert [len(part.labels) for part in data] == [1197, 300, 300]
    for part in data:
        shares = np.bincount(part.labels) / len(part.labels)
        np.testing.assert_allclose(shares, 0.1, atol=0.005)


def count_steps(monkeypatch, stop_at=None):
    """A list that grows by one with every batch; the one after `stop_at` is interrupted."""
    step, losses = train_digits.train_step, []

    def counting_step(*args):
        if len(losses) == stop_at:
            raise KeyboardInterrupt
        losses.append(step(*args))
        return losses[-1]

    monkeypatch.setattr(train_digits, "train_step", counting_step)
    return losses


def test_interrupted_comparison_resumes_to_the_same_bits(finished, tmp_path, monkeypatch):
    expected, _ = finished
    with monkeypatch.context() as patch:
        count_steps(patch, stop_at=8)
        with pytest.raises(KeyboardInterrupt):
            train_digits.main(options(SHORT, tmp_path))
    losses = count_steps(monkeypatch)
    (resumed,) = train_digits.main([*options(SHORT, tmp_path), "--resume"])
    assert len(losses) == 12 - 5
    assert_same_run(resumed, expected)


def test_finished_comparison_is_not_trained_again(finished, tmp_path, monkeypatch):
    expected, output = finished
    shutil.copytree(output, tmp_path, dirs_exist_ok=True)
    losses = count_steps(monkeypatch)
    (resumed,) = train_digits.main([*options(SHORT, tmp_path), "--resume"])
    assert not losses
    assert_same_run(resumed, expected)


def test_without_resume_a_comparison_begins_anew(finished, tmp_path, monkeypatch):
    _, output = finished
    shutil.copytree(output, tmp_path, dirs_exist_ok=True)
    count_steps(monkeypatch, stop_at=0)
    with pytest.raises(KeyboardInterrupt):
        train_digits.main(options(SHORT, tmp_path))


def test_resume_refuses_other_options(finished, capsys):
    _, output = finished
    with pytest.raises(SystemExit):
        train_digits.main([*options(SHORT, output), "--resume", "--seed", "7"])
    message = capsys.readouterr().err
    assert "--resume: --seed must be what it was" in message
    assert ", 0; got 7" in message


KILLED_STEPS, KILLS = 90, 20


def last_checkpoint(output):
    """The step of the last checkpoint that is complete, else 0."""
    folders = (output / "checkpoints" / "lans-32").glob("*")
    return max((int(path.name) for path in folders if path.name.isdigit()), default=0)


@pytest.mark.slow
def test_killed_again_and_again_it_ends_with_the_same_bits(tmp_path, monkeypatch):
    """Killed from outside, whatever it is doing: macro-batches, loss scale and masters included.

    The processes are forked from one that has imported all but done nothing, to be quick.
    """
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["examples.train_digits"])
    text = "--optimizer lans --batch-size 32 --macrobatch-size 64 --dtype float16 "
    text += f"--steps {KILLED_STEPS} --evaluate-every {KILLED_STEPS} --checkpoint-every 1"
    killed = options(text, tmp_path / "killed")
    rng = np.random.default_rng()
    kills = sorted(rng.choice(np.arange(1, KILLED_STEPS - 10), KILLS, replace=False).tolist())
    print("to be killed after the steps", kills)
    for kill in kills:
        resume = ["--resume"] if last_checkpoint(tmp_path / "killed") else []
        before = last_checkpoint(tmp_path / "killed")
        process = processes.Process(target=train_digits.main, args=([*killed, *resume],))
        process.start()
        while last_checkpoint(tmp_path / "killed") < max(kill, before + 1):
            assert process.is_alive(), "it ended before it could be killed"
            time.sleep(rng.uniform(0, 0.005))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert last_checkpoint(tmp_path / "killed") < KILLED_STEPS
    (resumed,) = train_digits.main([*killed, "--resume"])
    (expected,) = train_digits.main(options(text, tmp_path / "whole"))
    assert_same_run(resumed, expected)
    assert weights(resumed)[0].dtype == jnp.float16


@pytest.mark.slow
def test_default_comparison(tmp_path):
    """All four optimizers learn the digits at both batches."""
    results = train_digits.main(["--output", str(tmp_path)])
    assert [result.run.name for result in results] == [
        f"{optimizer}-{batch}"
        for batch in (32, 1024)
        for optimizer in ("adamw", "lamb", "lans", "lars")
    ]
    for result in results:
        assert result.test_accuracy > 0.9, result.run.name


def test_target_is_the_first_evaluation_that_reaches_it(finished):
    result, _ = finished
    nan = np.nan
    at_target = dataclasses.replace(
        result, accuracies=np.array([nan, 0.2, nan, 0.6, nan, 0.5, nan, 0.9]), target=0.6
    )
    assert (at_target.steps_to_target, at_target.examples_to_target) == (4, 4 * 32)
    never = dataclasses.replace(at_target, target=0.95)
    assert (never.steps_to_target, never.examples_to_target) == (None, None)


def test_evaluations_are_at_fixed_steps_and_at_the_end(finished):
    result, _ = finished
    assert list(np.flatnonzero(~np.isnan(result.accuracies)) + 1) == [4, 8, 12]
    data = train_digits.load_data()
    assert result.accuracies[-1] == train_digits.accuracy(result.model, *data.validation)
    assert result.test_accuracy == train_digits.accuracy(result.model, *data.test)


def test_curves_are_drawn_in_their_colours(finished):
    _, output = finished
    with Image.open(output / "curves.png") as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(maxcolors=2**24)}
        assert min(image.size) > 800
    assert ImageColor.getrgb(train_digits.COLOURS["lamb"]) in colours
    assert ImageColor.getrgb(train_digits.COLOURS["lars"]) not in colours


def test_results_are_written_as_json(finished):
    result, output = finished
    (run,) = json.loads((output / "results.json").read_text())["runs"]
    assert run["optimizer"] == "lamb"
    assert run["batch_size"] == 32
    assert run["steps"] == 12
    assert run["steps_to_target"] == result.steps_to_target
    assert run["examples_to_target"] == result.examples_to_target
    assert run["test_accuracy"] == result.test_accuracy


def test_table(finished):
    result, _ = finished
    header, line = train_digits.table([result]).splitlines()
    assert header.split()[:2] == ["optimizer", "batch"]
    cells = line.split()
    assert cells[:2] == ["lamb", "32"]
    assert cells[-1] == f"{result.test_accuracy:.3f}"


@pytest.mark.parametrize(
    ("text", "argument", "got"),
    [
        ("--optimizer lamb adam", "--optimizer", "'adam'"),
        ("--batch-size 32 0", "--batch-size", "'0'"),
        ("--batch-size 32 --macrobatch-size 16", "--macrobatch-size", "16"),
        ("--epochs 0", "--epochs", "'0'"),
        ("--steps 1.5", "--steps", "'1.5'"),
        ("--steps 3 --epochs 2", "--epochs", "--steps"),
        ("--learning-rate -1", "--learning-rate", "'-1'"),
        ("--weight-decay nan", "--weight-decay", "'nan'"),
        ("--schedule cosine", "--schedule", "'cosine'"),
        ("--power 0", "--power", "'0'"),
        ("--warmup-epochs inf", "--warmup-epochs", "'inf'"),
        ("--warmup-strategy cubic", "--warmup-strategy", "'cubic'"),
        ("--warmup-strategy lars --optimizer lbsgd lamb", "--warmup-strategy", "lamb"),
        ("--initializer zeros", "--initializer", "'zeros'"),
        ("--dtype int8", "--dtype", "'int8'"),
        ("--target 95", "--target", "'95'"),
        ("--evaluate-every 0", "--evaluate-every", "'0'"),
        ("--checkpoint-every 0", "--checkpoint-every", "'0'"),
        ("--seed -1", "--seed", "'-1'"),
        ("--resume", "--resume", "nothing to continue"),
    ],
)
def test_wrong_arguments_are_named(text, argument, got, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        train_digits.main(options(text, tmp_path))
    message = capsys.readouterr().err.splitlines()[-1]
    assert stopped.value.code == 2
    assert f"argument {argument}: " in message
    assert got in message
