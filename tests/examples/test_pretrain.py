"""The pretraining program, run as a user runs it but with a small network and for a few steps."""

import csv
from pathlib import Path
import re
import sys

import jax
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import orbax.checkpoint as ocp
import pytest

if not hasattr(jax, "shard_map"):
    pytest.skip("flax's scan fails on jax 0.6", allow_module_level=True)

import bert
import masked_text
import pretrain
from tests.processes import run_together

PROGRAM = Path(pretrain.__file__)
SMALL = "--layers 2 --width 16 --heads 2 --length 16 --micro-batch 8 --micro-batches 2"


pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder with a little text, some of it twice, and something that is no text."""
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    for index in range(4):
        words = rng.choice(["alpha ", "beta ", "gamma ", "delta "], 1000)
        (folder / f"{index}.txt").write_text("".join(words))
    (folder / "again.txt").write_bytes((folder / "0.txt").read_bytes())
    (folder / "picture.bin").write_bytes(b"\0\1\2")
    return folder


def options(text, folder, output):
    return [*SMALL.split(), *text.split(), "--text", str(folder), "--output", str(output)]


def rows(output):
    with (output / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def column(output, name):
    return np.array([float(row[name]) for row in rows(output)])


def arrays(output, step):
    """The parameters and the state of a checkpoint."""
    with ocp.CheckpointManager(output.absolute() / "checkpoints") as checkpoints:
        return jax.tree.leaves(checkpoints.restore(step, args=ocp.args.StandardRestore()))


def assert_same_run(output, expected, step):
    """The same to the last bit: every metric of every step, every weight, every moment."""
    assert (output / "metrics.csv").read_bytes() == (expected / "metrics.csv").read_bytes()
    found, wanted = arrays(output, step), arrays(expected, step)
    assert len(found) == len(wanted) > 20
    for one, other in zip(found, wanted, strict=True):
        assert_array_equal(one, other)


LENGTH = "--steps 12 --log-every 4 --checkpoint-every 5 --learning-rate 0.05 --dtype bfloat16"


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """The folder of a run on all eight devices that was not interrupted."""
    output = tmp_path_factory.mktemp("finished")
    pretrain.main(options(LENGTH, text, output))
    return output


@pytest.mark.slow
def test_loss_falls(finished):
    losses = column(finished, "loss")
    assert len(losses) == 12
    assert losses[-3:].mean() < 0.9 * losses[:3].mean()


@pytest.mark.slow
def test_rows_have_the_metrics_of_the_step_and_are_drawn(finished):
    steps = rows(finished)
    assert [int(row["step"]) for row in steps] == list(range(1, 13))
    assert [int(row["macro_step"]) for row in steps] == list(range(1, 13))
    assert all(int(row["micro_step"]) == 0 for row in steps)
    # After every four steps, after every checkpoint and in the end.
    assert [int(row["step"]) for row in steps if row["held_out_loss"]] == [4, 5, 8, 10, 12]
    for name in ("learning_rate", "param_norm", "trust_ratio/median", "noise_scale"):
        assert np.isfinite(column(finished, name)).all(), name
    assert (finished / "curves.png").exists()


@pytest.mark.slow
def test_parameters_in_bfloat16_have_masters(finished):
    kinds = {array.dtype.name for array in arrays(finished, 12) if array.ndim > 1}
    assert kinds == {"bfloat16", "float32"}


@pytest.mark.slow
def test_interrupted_run_resumes_to_the_same_bits(finished, text, tmp_path, monkeypatch, capsys):
    taken = []

    def sample_until(text, shape, length, *seed):
        if len(seed) == 2:  # a batch of training
            taken.append(seed[1])
            if len(taken) == 9:
                raise KeyboardInterrupt
        return masked_text.sample(text, shape, length, *seed)

    monkeypatch.setattr(pretrain, "sample", sample_until)
    with pytest.raises(KeyboardInterrupt):
        pretrain.main(options(LENGTH, text, tmp_path))
    assert len(rows(tmp_path)) == 8  # three more than the checkpoint has
    pretrain.main(options(LENGTH, text, tmp_path))
    assert taken == [*range(9), *range(5, 12)]
    assert "continues after step 5" in capsys.readouterr().out
    assert_same_run(tmp_path, finished, 12)


@pytest.mark.slow
def test_finished_run_is_not_trained_again(finished, text, capsys):
    before = (finished / "metrics.csv").read_bytes()
    pretrain.main(options(LENGTH, text, finished))
    assert "step 12/12" not in capsys.readouterr().out
    assert (finished / "metrics.csv").read_bytes() == before


@pytest.mark.slow
def test_resume_refuses_other_options(finished, text):
    with pytest.raises(SystemExit, match=r"--seed must be 0, as when .* began; got 7"):
        pretrain.main([*options(LENGTH, text, finished), "--seed", "7"])


@pytest.mark.slow
def test_one_device_and_eight_have_the_same_losses(text, tmp_path):
    arguments = "--steps 30 --log-every 10 --dtype float32"
    for devices in (1, 8):
        own = options(arguments, text, tmp_path / str(devices))
        log = tmp_path / f"{devices}.txt"
        run_together([[sys.executable, PROGRAM, *own]], devices, [log], seconds=400)
    for name in ("loss", "param_norm", "trust_ratio/median", "noise_scale"):
        one, eight = (column(tmp_path / devices, name) for devices in ("1", "8"))
        assert_allclose(one, eight, rtol=1e-5, err_msg=name)


def test_text_is_read_once_and_a_part_held_out(text):
    training, held_out = masked_text.read_text(text)
    expected = sum((text / f"{index}.txt").stat().st_size for index in range(4)) + 3
    assert len(training) + len(held_out) == expected
    assert len(held_out) == pytest.approx(expected / 16, abs=1)
    assert 0 not in training


def test_sample_masks_as_bert_does():
    text = np.frombuffer(b"abcdefghij" * 1000, np.uint8)
    tokens, positions, answers = masked_text.sample(text, (50, 40), 20, 0, 5)
    assert tokens.shape == (50, 40, 20)
    assert positions.shape == answers.shape == (50, 40, 3)
    seen = np.take_along_axis(tokens, positions, axis=-1)
    assert np.mean(seen == bert.MASK) == pytest.approx(0.8, abs=0.02)
    assert np.mean(seen == answers) == pytest.approx(0.1, abs=0.02)
    whole = tokens.copy()
    np.put_along_axis(whole, positions, answers, axis=-1)
    assert np.all(np.diff(whole) % 10 == 1)  # what was in the text, from anywhere
    again = masked_text.sample(text, (50, 40), 20, 0, 5)
    assert_array_equal(tokens, again.tokens)
    assert np.any(tokens != masked_text.sample(text, (50, 40), 20, 0, 6).tokens)


def test_a_text_that_is_too_short_is_an_error(tmp_path):
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(SystemExit, match=r"the text has .* bytes for sequences of 16"):
        pretrain.main(options("--steps 1", tmp_path, tmp_path / "output"))


@pytest.mark.parametrize(
    ("arguments", "argument", "got"),
    [
        ("--micro-batches 1", "--micro-batches", "'1'"),
        ("--heads 3", "--heads", "3"),
        ("--weight-decay nan", "--weight-decay", "'nan'"),
        ("--dtype int8", "--dtype", "'int8'"),
        ("--text missing", "--text", "missing"),
    ],
)
def test_wrong_arguments_are_named(arguments, argument, got, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        pretrain.main([*SMALL.split(), "--output", str(tmp_path), *arguments.split()])
    assert re.search(f"argument {argument}: .*{got}.*$", capsys.readouterr().err)
