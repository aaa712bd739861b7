"""The program that `test_two_processes.py` starts: a part of the network in each process.

    python -m tests.clients.of_two_processes ADDRESS PROCESSES PROCESS DIRECTORY FIRST LAST NAME ...

Each optimizer takes the micro-batches from FIRST to LAST, from the checkpoint at FIRST if that is
not 0, and leaves one at LAST. Process 0 prints a line of JSON for each micro-batch.
"""

import json
from pathlib import Path
import sys

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import orbax.checkpoint as ocp

import optax_largebatch as lb
from tests.clients.training import OPTIMIZERS, accumulated, first_params, loss_of, step_of

SPECS = {"hidden": P("devices"), "out": P("devices")}


def batch(number, place):
    """The same for all processes; each holds its own examples."""
    x = np.random.default_rng(number).normal(size=(16, 4)).astype("float32")
    both = (x, x.sum(1, keepdims=True))
    return tuple(jax.make_array_from_callback(a.shape, place, a.__getitem__) for a in both)


def train(name, directory, first, last):
    mesh = jax.make_mesh((jax.device_count(),), ("devices",), axis_types=(AxisType.Auto,))
    optimizer = accumulated(OPTIMIZERS[name]())
    places = {key: NamedSharding(mesh, spec) for key, spec in SPECS.items()}
    params = jax.jit(first_params, out_shardings=places)()
    state_places = lb.optimizer_state_shardings(optimizer, params, mesh)
    state = jax.jit(optimizer.init, out_shardings=state_places)(params)

    whole = NamedSharding(mesh, P())
    step = jax.jit(
        step_of(optimizer, loss_of),
        donate_argnums=(0, 1),
        out_shardings=(places, state_places, whole),
    )
    with ocp.CheckpointManager(directory / name) as checkpoints:
        if first:
            like = ocp.args.StandardRestore((params, state))
            params, state = checkpoints.restore(first, args=like)
        for number in range(first, last):
            given = batch(number, NamedSharding(mesh, P("devices")))
            params, state, (loss, metrics) = step(params, state, *given)
            if jax.process_index() == 0:
                line = {key: float(value) for key, value in metrics.items()}
                print(json.dumps({"name": name, "loss": float(loss)} | line), flush=True)
        checkpoints.save(last, args=ocp.args.StandardSave((params, state)))


def main(address, processes, process, directory, first, last, *names):
    if int(processes) > 1:
        jax.distributed.initialize(address, int(processes), int(process))
    for name in names:
        train(name, Path(directory), int(first), int(last))


if __name__ == "__main__":
    main(*sys.argv[1:])
