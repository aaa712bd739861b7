"""Trains a small network on handwritten digits on several hosts, and continues on others.

Start it once on every host. Here are two processes on one machine, with two devices each:

    export XLA_FLAGS=--xla_force_host_platform_device_count=2
    hosts="--coordinator localhost:8476 --num-processes 2"
    python examples/several_hosts.py $hosts --process-id 0 --steps 20 &
    python examples/several_hosts.py $hosts --process-id 1 --steps 20

Parameters and moments are split over all devices (FSDP), the examples over the processes. If it is
started again with more `--steps`, on any number of processes and devices, it continues:

    python examples/several_hosts.py --steps 40
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import orbax.checkpoint as ocp
from sklearn.datasets import load_digits

from bookkeeping import COUNT
import optax_largebatch as lb

KERNELS = ~lb.matching_kinds("bias", "norm")
OPTIMIZERS = {
    "muonh": lb.muonh(1e-2),
    "lamb": lb.lamb(3e-2, weight_decay=1e-2, weight_decay_mask=KERNELS, trust_ratio_mask=KERNELS),
    "lans": lb.lans(3e-2, weight_decay=1e-2, weight_decay_mask=KERNELS, trust_ratio_mask=KERNELS),
    "lars": lb.lars(3.0, 1e-4, weight_decay_mask=KERNELS, trust_ratio_mask=KERNELS),
}
BATCH_SIZE = 512
WIDTHS = (64, 64, 10)
LAYERS = [f"layer_{index}" for index in range(len(WIDTHS) - 1)]
SPECS = {layer: {"kernel": P("devices"), "bias": P()} for layer in LAYERS}


def first_params(key: jax.Array) -> dict[str, dict[str, jax.Array]]:
    """The initial values of LeCun."""
    keys = jax.random.split(key, len(LAYERS))
    initial = jax.nn.initializers.lecun_normal()
    return {
        layer: {"kernel": initial(key, (inputs, outputs)), "bias": jax.numpy.zeros(outputs)}
        for layer, key, inputs, outputs in zip(LAYERS, keys, WIDTHS[:-1], WIDTHS[1:], strict=True)
    }


def loss_of(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean cross entropy of a batch."""
    x = images
    for layer in LAYERS:
        x = x @ params[layer]["kernel"] + params[layer]["bias"]
        if layer != LAYERS[-1]:
            x = jax.numpy.tanh(x)
    return optax.softmax_cross_entropy_with_integer_labels(x, labels).mean()


class Batches:
    """The digits, in batches. The batch of a step depends on the step alone."""

    def __init__(self, mesh: jax.sharding.Mesh) -> None:
        digits = load_digits()
        self.images = (digits.data / 16).astype(np.float32)
        self.labels = digits.target.astype(np.int32)
        self.sharding = NamedSharding(mesh, P("devices"))

    def __getitem__(self, step: int) -> tuple[jax.Array, jax.Array]:
        """A batch over all devices, to which each process adds the rows that it has read."""
        rows = np.random.default_rng(step).choice(len(self.labels), BATCH_SIZE, replace=False)
        own = np.split(rows, jax.process_count())[jax.process_index()]
        images, labels = (
            jax.make_array_from_process_local_data(self.sharding, part[own])
            for part in (self.images, self.labels)
        )
        return images, labels


def train(name: str, steps: int, directory: Path) -> tuple[Any, Any]:
    """Trains up to `steps`, from the last checkpoint if there is one.

    Returns the parameters and the state of the optimizer.
    """
    mesh = jax.make_mesh((jax.device_count(),), ("devices",), axis_types=(AxisType.Auto,))
    param_shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS)
    optimizer = lb.with_partition_specs(OPTIMIZERS[name], param_shardings)
    params = jax.jit(first_params, out_shardings=param_shardings)(jax.random.key(0))
    state_shardings = lb.optimizer_state_shardings(optimizer, params, mesh)
    state = jax.jit(optimizer.init, out_shardings=state_shardings)(params)

    @jax.jit(donate_argnums=(0, 1), out_shardings=(param_shardings, state_shardings, None))
    def train_step(params: Any, state: Any, images: jax.Array, labels: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, images, labels)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return params, state, {"loss": loss, **lb.step_metrics(state, params)}

    batches = Batches(mesh)
    with ocp.CheckpointManager(directory.absolute() / name) as checkpoints:
        start = checkpoints.latest_step() or 0
        if start:  # each array goes to the devices that its place in `like` has
            like = ocp.args.StandardRestore((params, state))
            params, state = checkpoints.restore(start, args=like)
        for step in range(start, steps):
            params, state, metrics = train_step(params, state, *batches[step])
            if jax.process_index() == 0 and step in (start, steps - 1):
                loss = metrics.pop("loss")
                others = ", ".join(f"{metric} {value:.3f}" for metric, value in metrics.items())
                print(f"{name}: step {step}, loss {loss:.3f}, {others}", flush=True)
        if start < steps:
            checkpoints.save(steps, args=ocp.args.StandardSave((params, state)))
    return params, state


def main(argv: Sequence[str] | None = None) -> None:
    """Joins the other processes and trains."""
    parser = argparse.ArgumentParser(description="Trains on several hosts.")
    add = parser.add_argument
    add("--coordinator", metavar="HOST:PORT", help="an address of process 0 with a free port")
    add("--num-processes", type=int, default=1, metavar="N", help="(default: 1)")
    add("--process-id", type=int, default=0, metavar="I", help="from 0 (default: 0)")
    add("--optimizer", nargs="+", choices=tuple(OPTIMIZERS), default=["muonh"], help="one or more")
    add("--steps", type=COUNT, default=20, metavar="N", help="in all (default: 20)")
    add(
        "--directory",
        type=Path,
        default=Path("runs/several_hosts"),
        metavar="DIR",
        help="where checkpoints go, the same for all processes (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    if args.num_processes > 1:
        own = args.num_processes, args.process_id
        jax.distributed.initialize(args.coordinator, *own)
    for name in args.optimizer:
        train(name, args.steps, args.directory)


if __name__ == "__main__":
    main()
