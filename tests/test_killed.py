"""A process that is killed again and again ends with the same bits as one that is left alone.

Macro-batches, a loss scale that changes and masters included. `python -m tests.test_killed` is
the process.
"""

import os
from pathlib import Path
import signal
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.optimizers.checkpointed import mixed_precision, parameters, trained

ROOT = Path(__file__).parents[1]
STEPS, KILLS = 60, 20


def train(directory, kill_at=-1):
    """Trains from the last complete checkpoint on, and saves after every step in the background.

    After the step `kill_at` the process kills itself, in the midst of saving that step.
    """
    optimizer = mixed_precision()
    now = parameters(), optimizer.init(parameters())
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(directory, options=options) as checkpoints:
        first = checkpoints.latest_step() or 0
        if first:
            now = checkpoints.restore(first, args=ocp.args.StandardRestore(now))
        for step in range(first, STEPS):
            overflows = step % 11 == 4
            now = trained(optimizer, *now, steps=[np.inf if overflows else step])
            checkpoints.save(step + 1, args=ocp.args.StandardSave(now))
            if step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    return now


def run(directory, kill_at):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.test_killed", str(directory), str(kill_at)]
    return subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode


@pytest.mark.slow
def test_ends_with_the_same_bits(tmp_path):
    rng = np.random.default_rng()
    kills = sorted(rng.choice(STEPS, KILLS, replace=False).tolist())
    print("killed after the steps", kills)
    for kill in kills:
        assert run(tmp_path / "killed", kill) == -signal.SIGKILL
    assert run(tmp_path / "killed", -1) == 0
    assert run(tmp_path / "whole", -1) == 0
    states = []
    for directory in ("killed", "whole"):
        like = parameters(), mixed_precision().init(parameters())
        with ocp.CheckpointManager(tmp_path / directory) as checkpoints:
            assert checkpoints.latest_step() == STEPS
            states.append(checkpoints.restore(STEPS, args=ocp.args.StandardRestore(like)))
    jax.tree.map(np.testing.assert_array_equal, *states)
    assert int(states[0][1].inner_state.skipped) == 6


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]))
