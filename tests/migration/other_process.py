"""Runs go on from what another process has saved, on the devices of this one.

python -m tests.migration.other_process FOLDER
"""

from pathlib import Path
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp

import optax_largebatch as lb
from tests.migration.changes import AFTER, BEFORE, CHANGES, OPTIMIZERS, Run, begun, make


def restored(name: str, folder: Path) -> Run:
    """A run before its change, split between the devices of this process."""
    run = begun(make(name))
    mesh = jax.sharding.Mesh(jax.devices(), ("x",))
    layout = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    params = jax.device_put(run.params, layout)
    state = jax.device_put(run.state, lb.optimizer_state_shardings(run.optimizer, params, mesh))
    with ocp.StandardCheckpointer() as checkpointer:
        params, state = checkpointer.restore(folder / name, (params, state))
    return run._replace(params=params, state=state, steps=BEFORE)


def main(folder: Path) -> None:
    """Writes the weights of each run some steps later, with its layers stacked in between."""
    for name in OPTIMIZERS:
        run = CHANGES["stacked, and apart"](name, restored(name, folder))
        np.savez(folder / f"{name}.npz", **run.until(BEFORE + AFTER).weights())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
