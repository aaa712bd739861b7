"""What a step costs with all parameters split over eight devices (FSDP), beside `optax.lamb`.

    python benchmarks/sharded_step.py
    python benchmarks/sharded_step.py --width 64 256 --output benchmarks/results/cpu-2-cores

Steps of a transformer of 78 leaves, interleaved and compared round by round as in
`step_cost.py`; the eight devices are threads of one CPU. Each of our optimizers runs in three ways:
under `jit`; under `jit`, told how the parameters are split (`partition_specs`); and inside
`jax.shard_map`. Counts the all-reduces of the compiled step. Writes `sharded_step.csv`.
"""

import argparse
import csv
from pathlib import Path
import re
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 8)

from jax.sharding import AxisType, NamedSharding, PartitionSpec
from machine import machine
import numpy as np
import optax
from step_cost import Running, arrays
from tqdm import tqdm

import optax_largebatch as lb

BASELINE = ("optax.lamb", "jit")
OPTIMIZERS = {
    "optax.lamb": optax.lamb(1e-3, weight_decay=0.01),
    "optax.adamw": optax.adamw(1e-3, weight_decay=0.01),
    "lamb": lb.lamb(1e-3, weight_decay=0.01),
    "lans": lb.lans(1e-3, weight_decay=0.01),
    "lars": lb.lars(1e-3, weight_decay=0.01),
}
WAYS = ("jit", "jit, told", "shard_map")


def transformer(width: int, layers: int = 6, vocabulary: int = 1024) -> dict[str, Any]:
    """Shapes of a transformer; 6 layers have 78 leaves."""

    def dense(rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        return {"kernel": (rows, columns), "bias": (columns,)}

    layer = {
        **{name: dense(width, width) for name in ("query", "key", "value", "output")},
        "up": dense(width, 4 * width),
        "down": dense(4 * width, width),
    }
    return {
        **{f"layer_{index}": layer for index in range(layers)},
        "embedding": {"tokens": (vocabulary, width), "positions": (64, width)},
        "norm": {"scale": (width,), "bias": (width,)},
        "head": dense(width, vocabulary),
    }


def prepare(name: str, way: str, width: int) -> tuple[Running, int]:
    """A compiled step and the number of its all-reduces."""
    optimizer = OPTIMIZERS[name]
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("fsdp"))
    params = jax.device_put(arrays(transformer(width)), split)
    gradients = jax.device_put(arrays(transformer(width)), split)
    shardings = lb.shard_optimizer_state(optimizer, params, mesh)
    state = jax.jit(optimizer.init, out_shardings=shardings)(params)
    told = {"partition_specs": split} if way == "jit, told" else {}

    def step(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(gradients, state, params, **told)
        return optax.apply_updates(params, updates), state

    if way == "shard_map":
        specs = (split.spec, jax.tree.map(lambda sharding: sharding.spec, shardings))
        step = jax.shard_map(step, mesh=mesh, in_specs=(*specs, split.spec), out_specs=specs)
    compiled = (
        jax.jit(step, out_shardings=(split, shardings), donate_argnums=(0, 1))
        .lower(params, state, gradients)
        .compile()
    )
    count = len(re.findall(r" all-reduce(?:-start)?\(", compiled.as_text()))
    return Running(compiled, params, state, gradients), count


def measure(width: int, rounds: int) -> list[dict[str, Any]]:
    """All optimizers in all ways at one width, a step of each in every round."""
    cases = [
        (name, way)
        for name in OPTIMIZERS
        for way in (WAYS[:1] if name.startswith("optax") else WAYS)
    ]
    prepared = {case: prepare(*case, width) for case in tqdm(cases, desc="compiling")}
    for _ in tqdm(range(rounds + 1), desc=f"width {width}: stepping"):
        for running, _ in prepared.values():
            running.run()
    baseline = prepared[BASELINE][0].seconds[1:]
    rows = []
    for (name, way), (running, count) in prepared.items():
        low, median, high = np.quantile(np.divide(running.seconds[1:], baseline), (0.1, 0.5, 0.9))
        rows.append(
            {
                "width": width,
                "parameters": sum(x.size for x in jax.tree.leaves(running.params)),
                "optimizer": name,
                "way": way,
                "all_reduces": count,
                "ratio": round(median, 2),
                "ratio_low": round(low, 2),
                "ratio_high": round(high, 2),
                "machine": machine(),
            }
        )
    return rows


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--width", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--rounds", type=int, default=30, help="steps of each optimizer")
    parser.add_argument("--output", type=Path, default=Path("runs/sharded_step"))
    args = parser.parse_args()
    rows = [row for width in args.width for row in measure(width, args.rounds)]
    args.output.mkdir(parents=True, exist_ok=True)
    with (args.output / "sharded_step.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(machine())
    print(f"{'parameters':>10}  {'optimizer':<12} {'way':<10} {'reductions':>11} x optax.lamb")
    for row in rows:
        print(
            f"{row['parameters']:>10}  {row['optimizer']:<12} {row['way']:<10} "
            f"{row['all_reduces']:>11} {row['ratio']:.2f} "
            f"({row['ratio_low']:.2f}..{row['ratio_high']:.2f})"
        )


if __name__ == "__main__":
    main()
