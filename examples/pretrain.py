"""Pretrains a byte-level BERT on text with LANS, on whatever devices there are.

    python examples/pretrain.py                  # reads the source of Python's standard library
    python examples/pretrain.py --text DIR --layers 12 --width 512 --steps 10000

It prints a line every ten steps. In `runs/pretrain` it leaves `metrics.csv`, with a row for each
step, and `curves.png`. If it is killed and started again with the same options, it continues from
its last checkpoint, and ends with the same bits as without the interruption (on a GPU with
XLA_FLAGS=--xla_gpu_deterministic_ops=true).

In float32, the default on a CPU, the losses of the first command are the same on one device and on
many, to 1e-5. In bfloat16, the default elsewhere, they differ by a few hundredths. So they do at
learning rates so large that a difference in rounding grows from step to step.
"""

import argparse
from collections.abc import Sequence
import math
from pathlib import Path
import sys
import time
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import orbax.checkpoint as ocp
from tqdm import tqdm

from bert import Bert
from bookkeeping import COUNT, NOT_NEGATIVE, POSITIVE, SEED, SEVERAL, Table, draw, same_options
from masked_text import Batch, read_text, sample
import optax_largebatch as lb

RECIPE = "bert-large/lans/paper-phase1"
HELD_OUT = 8  # micro-batches that are looked at every `--log-every` steps
PICTURE = {
    "loss of the masked bytes": ("loss", "held_out_loss"),
    "learning rate": ("learning_rate",),
    "trust ratio of a layer": ("trust_ratio/max", "trust_ratio/median", "trust_ratio/min"),
    "noise scale, in sequences": ("noise_scale",),
}


def train(args: argparse.Namespace) -> Table:
    """Trains from the last checkpoint, or from the start; returns the metrics of all steps."""
    training, held_out = read_text(args.text)
    print(f"{len(training):,} bytes to train on, {len(held_out):,} held out")

    # As many devices as the sizes can be split over; one will do.
    tensor = math.gcd(jax.device_count(), args.tensor, args.heads)
    fsdp = math.gcd(jax.device_count() // tensor, args.micro_batch, args.width)
    mesh = jax.make_mesh((fsdp, tensor), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    print(f"{fsdp} x {tensor} of {jax.device_count()} {jax.devices()[0].device_kind}, {args.dtype}")

    # The parameters, each made where it will lie. The model says along which axes that is.
    by_sequence = NamedSharding(mesh, P("fsdp"))
    model = Bert(args.layers, args.width, args.heads, jnp.dtype(args.dtype), by_sequence)
    first = sample(training, (args.micro_batch,), args.length, args.seed)
    key = jax.random.key(args.seed)

    def init(key: jax.Array) -> Any:
        return model.init(key, first.tokens, first.positions)["params"]

    specs = nn.get_partition_spec(jax.eval_shape(init, key))
    param_shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    params = jax.jit(lambda key: nn.unbox(init(key)), out_shardings=param_shardings)(key)

    # The optimizer: a published recipe with what is different here. Every scanned layer has a
    # trust ratio of its own. A step takes the mean gradient of the micro-batches, the noise scale
    # is measured on one step in ten, and parameters in bfloat16 have float32 masters.
    stacked = lb.stacked_layers({"^layers/": 0})
    changed = {"learning_rate": args.learning_rate, "weight_decay": args.weight_decay}
    recipe = lb.recipes.get(RECIPE, total_steps=args.steps, **changed)
    optimizer = recipe.optimizer(params, stacked=stacked)
    print(lb.explain(optimizer, params))
    optimizer = lb.chain(lb.measure_noise_scale(), optimizer)
    optimizer = lb.accumulate_gradients(optimizer, every=args.micro_batches, small_batches=10)
    optimizer = lb.master_weights(optimizer)
    state_shardings = lb.optimizer_state_shardings(optimizer, params, mesh)
    state = jax.jit(optimizer.init, out_shardings=state_shardings)(params)

    def loss_of(params: Any, batch: Batch) -> jax.Array:
        logits = model.apply({"params": params}, batch.tokens, batch.positions)
        losses = optax.softmax_cross_entropy_with_integer_labels
        return losses(logits.astype(jnp.float32), batch.answers).mean()

    def micro_step(carry: Any, batch: Batch) -> Any:
        params, state = carry
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        told = {"examples": args.micro_batch, "partition_specs": param_shardings}
        updates, state = optimizer.update(grads, state, params, **told)
        return (optax.apply_updates(params, updates), state), loss

    def train_step(params: Any, state: Any, batches: Batch) -> Any:
        (params, state), losses = jax.lax.scan(micro_step, (params, state), batches)
        return params, state, {"loss": losses.mean(), **lb.step_metrics(state, params)}

    def held_out_loss(params: Any, batches: Batch) -> jax.Array:
        return jax.lax.map(lambda batch: loss_of(params, batch), batches).mean()

    shardings = param_shardings, state_shardings, None
    train_step = jax.jit(train_step, donate_argnums=(0, 1), out_shardings=shardings)
    held_out_loss = jax.jit(held_out_loss)

    def batches_of(text: np.ndarray, micro_batches: int, *seed: int) -> Batch:
        batches = sample(text, (micro_batches, args.micro_batch), args.length, *seed)
        return jax.device_put(batches, NamedSharding(mesh, P(None, "fsdp")))

    evaluated = batches_of(held_out, HELD_OUT, args.seed)
    manager_options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(
        args.output.absolute() / "checkpoints", options=manager_options
    ) as checkpoints:
        start = checkpoints.latest_step() or 0
        same_options(args, args.output / "options.json", resumed=start > 0)
        if start:  # arrays are split as the new ones, however many devices wrote them
            like = ocp.args.StandardRestore((params, state))
            params, state = checkpoints.restore(start, args=like)
            print(f"continues after step {start} of {args.output}")
        table, rows, since = Table(args.output / "metrics.csv", keep=start), [], time.perf_counter()
        # The bar is for a terminal; into a log file go the lines alone.
        for step in tqdm(range(start, args.steps), initial=start, total=args.steps, disable=None):
            batches = batches_of(training, args.micro_batches, args.seed, step)
            params, state, metrics = train_step(params, state, batches)
            rows.append({"step": step + 1, "held_out_loss": "", **metrics})
            saves = (step + 1) % args.checkpoint_every == 0 or step + 1 == args.steps
            if (step + 1) % args.log_every and not saves:
                continue  # and do not wait for the devices

            rows[-1]["held_out_loss"] = held_out_loss(params, evaluated)
            rows = [{name: jax.device_get(own) for name, own in row.items()} for row in rows]
            speed = len(rows) / (time.perf_counter() - since)
            tqdm.write(line(rows, args.steps, speed))
            table.append(*rows)
            if saves:  # in the background; the rows up to here are in the file
                checkpoints.save(step + 1, args=ocp.args.StandardSave((params, state)))
            rows, since = [], time.perf_counter()
    return table


def line(rows: Sequence[dict[str, Any]], steps: int, speed: float) -> str:
    """The line for some steps: the mean of their losses, and the other metrics of the last step."""
    loss, last = np.mean([row["loss"] for row in rows]), rows[-1]
    return (
        f"step {last['step']:>{len(str(steps))}}/{steps}  loss {loss:.4f}  "
        f"held out {last['held_out_loss']:.4f}  rate {last['learning_rate']:.2e}  "
        f"trust ratio {last['trust_ratio/median']:.3f}  noise scale {last['noise_scale']:.1f}  "
        f"{speed:.2f} steps/s"
    )


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked; wrong ones end the program with a message."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description="Pretrains a BERT.", formatter_class=formatter)
    add = parser.add_argument
    add("--text", type=Path, metavar="DIR", help="its files, in place of the standard library")
    add("--layers", type=COUNT, default=4, metavar="N", help="of the network")
    add("--width", type=COUNT, default=64, metavar="N", help="of the network")
    add("--heads", type=COUNT, default=4, metavar="N", help="of attention")
    add("--length", type=COUNT, default=64, metavar="N", help="bytes in a sequence")
    add("--micro-batch", type=COUNT, default=16, metavar="N", help="sequences in a micro-batch")
    add("--micro-batches", type=SEVERAL, default=4, metavar="N", help="micro-batches in a step")
    add("--steps", type=COUNT, default=200, metavar="N", help="the schedule falls to 0 at the last")
    add("--learning-rate", type=POSITIVE, default=0.01, metavar="X", help="its peak")
    add("--weight-decay", type=NOT_NEGATIVE, default=0.01, metavar="X", help="of kernels")
    half = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    add("--dtype", choices=("bfloat16", "float32"), default=half, help="of all but the masters")
    add("--tensor", type=COUNT, default=2, metavar="N", help="devices over which a layer is split")
    add("--seed", type=SEED, default=0, metavar="N", help="of the parameters and the batches")
    add("--log-every", type=COUNT, default=10, metavar="N", help="steps from line to line")
    add("--checkpoint-every", type=COUNT, default=50, metavar="N", help="steps between two")
    add("--output", type=Path, default=Path("runs/pretrain"), metavar="DIR", help="what it leaves")
    args = parser.parse_args(argv)
    if args.width % args.heads:
        parser.error(f"argument --heads: must divide --width, {args.width}; got {args.heads}")
    if args.text and not args.text.is_dir():
        parser.error(f"argument --text: must be a folder, got {args.text}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, and draws the curves."""
    sys.stdout.reconfigure(line_buffering=True)  # a line is in the log file when it is printed
    args = parse_arguments(argv)
    table = train(args)
    picture = args.output / "curves.png"
    draw(table, PICTURE, picture)
    print(f"{table.path} has every step, {picture} the curves")


if __name__ == "__main__":
    main()
