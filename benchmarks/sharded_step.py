"""The cost of a step with all parameters split over eight devices (FSDP), beside `optax.lamb`.

    python -m benchmarks.sharded_step
    python -m benchmarks.sharded_step --width 64 256 --output benchmarks/results/cpu-2-cores

Steps of a transformer of 78 leaves, interleaved and compared round by round as in
`step_cost`; the eight devices are threads of one CPU. Each of our optimizers runs in three ways:
under `jit`; under `jit` with `partition_specs`; and inside `jax.shard_map`. Counts the all-reduces
of the compiled step. Writes `sharded_step.csv`.
"""

import argparse
import re
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 8)

from jax.sharding import AxisType, NamedSharding, PartitionSpec
import optax
from tqdm import tqdm

from benchmarks.harness.machine import machine
from benchmarks.harness.results import add_output, report
from benchmarks.harness.steps import Running, start, updated
from benchmarks.harness.trees import arrays, transformer
from benchmarks.harness.turns import in_turns, ratio
import optax_largebatch as lb

BASELINE = ("optax.lamb", "jit")
OPTIMIZERS = {
    "optax.lamb": optax.lamb(1e-3, weight_decay=0.01),
    "optax.adamw": optax.adamw(1e-3, weight_decay=0.01),
    "lamb": lb.lamb(1e-3, weight_decay=0.01),
    "lans": lb.lans(1e-3, weight_decay=0.01),
    "lars": lb.lars(1e-3, weight_decay=0.01),
}
WAYS = ("jit", "jit, specs", "shard_map")


def prepare(name: str, way: str, width: int) -> tuple[Running, int]:
    """A compiled step and the number of its all-reduces."""
    optimizer = OPTIMIZERS[name]
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("fsdp"))
    params = jax.device_put(arrays(transformer(width)), split)
    gradients = jax.device_put(arrays(transformer(width)), split)
    shardings = lb.optimizer_state_shardings(optimizer, params, mesh)
    state = jax.jit(optimizer.init, out_shardings=shardings)(params)
    extra = {"partition_specs": split} if way == "jit, specs" else {}

    def step(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        return updated(optimizer, gradients, params, state, **extra)

    if way == "shard_map":
        specs = (split.spec, jax.tree.map(lambda sharding: sharding.spec, shardings))
        step = jax.shard_map(step, mesh=mesh, in_specs=(*specs, split.spec), out_specs=specs)
    running = start(step, params, state, gradients, out_shardings=(split, shardings))
    return running, len(re.findall(r" all-reduce(?:-start)?\(", running.compiled.as_text()))


def measure(width: int, rounds: int) -> list[dict[str, Any]]:
    """All optimizers in all ways at one width, a step of each in every round."""
    cases = [
        (name, way)
        for name in OPTIMIZERS
        for way in (WAYS[:1] if name.startswith("optax") else WAYS)
    ]
    prepared = {case: prepare(*case, width) for case in tqdm(cases, desc="compiling")}
    running = {case: step for case, (step, _) in prepared.items()}
    seconds = in_turns(running, rounds, description=f"width {width}: stepping")
    return [
        {
            "width": width,
            "parameters": step.parameters,
            "optimizer": name,
            "way": way,
            "all_reduces": count,
            **ratio(seconds[name, way], seconds[BASELINE]).as_row(2),
            "machine": machine(),
        }
        for (name, way), (step, count) in prepared.items()
    ]


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--width", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--rounds", type=int, default=30, help="steps of each optimizer")
    add_output(parser, "sharded_step")
    args = parser.parse_args()
    rows = [row for width in args.width for row in measure(width, args.rounds)]
    report(rows, args.output / "sharded_step.csv")


if __name__ == "__main__":
    main()
