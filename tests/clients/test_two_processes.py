"""Plain JAX in two processes: split parameters, a checkpoint of both, and one goes on alone."""

import json
import sys

import numpy as np
import pytest

from tests.clients.training import MICRO_BATCHES, NEEDS_JAX_0_8, OPTIMIZERS, assert_log
from tests.processes import free_address, run_together

DEVICES = 4


def lines_of(directory, processes, first, last):
    """What the first of so many processes prints, by optimizer."""
    command = [sys.executable, "-m", "tests.clients.of_two_processes", free_address()]
    rest = [str(x) for x in (directory, first, last, *OPTIMIZERS)]
    commands = [[*command, str(processes), str(index), *rest] for index in range(processes)]
    logs = [directory.with_name(f"{first}-{index}.txt") for index in range(processes)]
    printed = run_together(commands, DEVICES // processes, logs, seconds=300)
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    by_name = {name: [] for name in OPTIMIZERS}
    for line in lines:
        by_name[line.pop("name")].append(line)
    return by_name


@NEEDS_JAX_0_8
@pytest.mark.slow
def test_train_save_and_one_goes_on(tmp_path):
    directory = tmp_path / "checkpoints"
    halfway = lines_of(directory, 2, 0, MICRO_BATCHES // 2)
    alone = lines_of(directory, 1, MICRO_BATCHES // 2, MICRO_BATCHES)
    uninterrupted = lines_of(tmp_path / "uninterrupted", 1, 0, MICRO_BATCHES)
    for name in OPTIMIZERS:
        log = halfway[name] + alone[name]
        for line, expected in zip(log, uninterrupted[name], strict=True):
            assert line.keys() == expected.keys()
            np.testing.assert_allclose(
                list(line.values()), list(expected.values()), rtol=1e-4, atol=1e-6
            )
        assert_log(log, [line.pop("loss") for line in log])
