"""Two processes train, save and continue as one would, and so does one that takes over from two.

The program is the example that the guide is about; hosts are processes on this machine.
"""

import shutil
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from examples import several_hosts
from tests.processes import free_address, run_together

OPTIMIZERS = ("muonh", "lamb", "lans", "lars")
SAVED, STEPS = 4, 8

pytestmark = pytest.mark.slow


def run(directory, steps, processes, devices):
    """Starts the processes, waits for them, and returns what the first one prints."""
    options = f"--coordinator {free_address()} --num-processes {processes} --steps {steps}"
    command = [sys.executable, "-W", "error", several_hosts.__file__, *options.split()]
    command += ["--directory", str(directory), "--optimizer", *OPTIMIZERS]
    commands = [[*command, "--process-id", str(index)] for index in range(processes)]
    logs = [directory.with_name(f"{steps}-steps-{index}.txt") for index in range(processes)]
    return run_together(commands, devices, logs, seconds=120)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Parameters and state of each optimizer after a run in this process, on its eight devices."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return {name: several_hosts.train(name, STEPS, directory) for name in OPTIMIZERS}


@pytest.fixture(scope="module")
def half_way(tmp_path_factory):
    """The checkpoints that two processes of two devices leave half-way."""
    directory = tmp_path_factory.mktemp("half_way") / "checkpoints"
    run(directory, SAVED, processes=2, devices=2)
    return directory


@pytest.mark.parametrize(("processes", "devices"), [(1, 4), (2, 2)])
def test_continues_as_if_it_had_not_been_interrupted(
    processes, devices, half_way, uninterrupted, tmp_path
):
    directory = shutil.copytree(half_way, tmp_path / "checkpoints")
    printed = run(directory, STEPS, processes, devices)
    for name, expected in uninterrupted.items():
        assert f"{name}: step {SAVED}, loss" in printed  # the first step after the checkpoint
        with ocp.CheckpointManager(directory / name) as checkpoints:
            saved = checkpoints.restore(STEPS, args=ocp.args.StandardRestore(expected))
        for one, other in zip(jax.tree.leaves(saved), jax.tree.leaves(expected), strict=True):
            scale = np.abs(other).max()
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * scale)


def test_a_number_of_steps_that_is_none(capsys):
    with pytest.raises(SystemExit):
        several_hosts.main(["--steps", "-1"])
    assert "--steps: must be a whole number of 1 or more, got '-1'" in capsys.readouterr().err
