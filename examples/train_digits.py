"""Trains a small convolutional network on handwritten digits, at a small and at a large batch.

Without arguments it compares AdamW with LAMB, LANS and MuonH at batches of 32 and of 1024, each
over the same examples and over three seeds: how many steps until the validation accuracy is 0.95?

    python examples/train_digits.py
    python examples/train_digits.py --optimizer lamb larc --batch-size 64 256 --weight-decay 0.1
    python examples/train_digits.py --optimizer lamb lbsgd --batch-size 32 --micro-batches 16

It prints a line for each optimizer and batch, a table and a verdict. In `runs/digits` it leaves
`results.csv`, with a row for each run, and `curves.png`. `build_optimizer` and `train` show how to
use the library; `pretrain.py` is a larger program.
"""

import argparse
from collections.abc import Iterator, Sequence
import functools
import itertools
import math
from pathlib import Path
import sys
from typing import Any

from flax import nnx
import jax
import numpy as np
import optax
from tqdm import tqdm

from bookkeeping import COUNT, NOT_NEGATIVE, POSITIVE, SHARE, Table
from comparison import Result, draw, one_line, table, verdict
from digits import DEFAULTS, ConvNet, Data, default_rate, load_data, shuffled
import optax_largebatch as lb


def build_optimizer(
    name: str,
    rate: float,
    momentum: float,
    decay: float,
    micro_batches: int,
    epoch: float,
    steps: int,
) -> optax.GradientTransformation:
    """An optimizer for `steps` steps, `epoch` of them in an epoch; `update` takes micro-batches."""
    warmup = {"warmup_steps": min(steps, round(5 * epoch)), "warmup_begin_value": rate / 100}
    schedule = lb.warmup_decay(rate, total_steps=steps, **warmup)
    # Biases and normalisation scales are neither decayed nor adapted: they start at 0 or 1, and
    # their norms do not say how far a step should go.
    kernels = ~lb.matching_kinds("bias", "norm")
    decayed = {"weight_decay": decay, "weight_decay_mask": kernels}
    if name == "lbsgd":  # it takes the micro-batches together and warms up by itself
        return lb.lbsgd(
            lb.warmup_decay(rate, total_steps=steps),
            momentum=momentum,
            **decayed,
            batch_scale=micro_batches,
            warmup_epochs=5,
            updates_per_epoch=epoch * micro_batches,
        )
    optimizer = {
        "adamw": lambda: optax.adamw(schedule, b1=momentum, weight_decay=decay, mask=kernels.mask),
        "lamb": lambda: lb.lamb(schedule, b1=momentum, **decayed, trust_ratio_mask=kernels),
        "lans": lambda: lb.lans(schedule, b1=momentum, **decayed, trust_ratio_mask=kernels),
        # The kernels keep their norms, so there is no weight decay. A convolution is a matrix from
        # all inputs of a pixel to its outputs; the last layer takes Adam's direction.
        "muonh": lambda: lb.muonh(
            schedule,
            beta=momentum,
            b1=momentum,
            b2=0.999,
            matrix_axes={"conv.*kernel": ((0, 1, 2), 3)},
            adamh_mask=lb.matching("linear.*kernel"),
        ),
        # The leaves that are not adapted move at the learning rate itself. With the paper's
        # coefficient, 0.001, a rate large enough for the kernels is far too large for these leaves.
        "lars": lambda: lb.lars(
            schedule, momentum=momentum, **decayed, trust_coefficient=0.5, trust_ratio_mask=kernels
        ),
        "larc": lambda: lb.larc(schedule, momentum=momentum, **decayed, trust_ratio_mask=kernels),
    }[name]()
    return lb.accumulate_gradients(optimizer, every=micro_batches)


@functools.partial(jax.jit, static_argnames="graph")
def accuracy(graph: nnx.GraphDef, params: nnx.State, images: Any, labels: Any) -> jax.Array:
    """The share of the images that the network reads correctly."""
    return (nnx.merge(graph, params)(images).argmax(axis=-1) == labels).mean()


def train(
    name: str, batch_size: int, seeds: Sequence[int], data: Data, args: argparse.Namespace
) -> Iterator[Result]:
    """The runs of an optimizer at a batch size, one for each seed."""
    images, labels = data.train
    micro_batches, examples = args.micro_batches, args.micro_batches * batch_size
    batch = f"{micro_batches}x{batch_size}" if micro_batches > 1 else f"{batch_size}"
    epoch = len(labels) / examples
    steps = max(1, round(args.epochs * epoch))
    # LBSGD is told the learning rate of a micro-batch and scales it up itself.
    rate = args.learning_rate or default_rate(name, batch_size if name == "lbsgd" else examples)
    decay = DEFAULTS[name].weight_decay if args.weight_decay is None else args.weight_decay
    momentum = DEFAULTS[name].momentum
    optimizer = build_optimizer(name, rate, momentum, decay, micro_batches, epoch, steps)

    @jax.jit
    def train_step(params: Any, state: Any, images: jax.Array, labels: jax.Array) -> Any:
        def loss_of(params: Any) -> jax.Array:
            logits = nnx.merge(graph, params)(images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(grads, state, params)
        metrics = {"loss": loss, **lb.step_metrics(state)}
        return optax.apply_updates(params, updates), state, metrics

    for seed in seeds:
        graph, params = nnx.split(ConvNet(nnx.Rngs(seed)))
        state, losses, reached = optimizer.init(params), [], math.inf
        order = shuffled(len(labels), steps * examples, seed)
        for step, batches in enumerate(order.reshape(steps, micro_batches, batch_size)):
            for indices in batches:
                params, state, metrics = train_step(params, state, images[indices], labels[indices])
                losses.append(metrics["loss"])
            if reached == math.inf and accuracy(graph, params, *data.validation) >= args.target:
                reached = step + 1
        tested = float(accuracy(graph, params, *data.test))
        ratio = float(metrics.get("trust_ratio/median", math.nan))
        run = name, batch, seed, rate, args.epochs, steps, reached, tested, ratio
        yield Result(*run, np.array(losses))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked; wrong ones end the program with a message."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description="Compares optimizers.", formatter_class=formatter)
    add, names = parser.add_argument, tuple(DEFAULTS)
    add("--optimizer", nargs="+", choices=names, default=names[:4], help="one or more")
    add("--batch-size", nargs="+", type=COUNT, default=(32, 1024), help="one or more")
    add("--micro-batches", type=COUNT, default=1, help="as many batches make a step")
    add("--epochs", type=POSITIVE, default=40.0, help="passes through the training examples")
    add("--learning-rate", type=POSITIVE, help="in place of those in this file")
    add("--weight-decay", type=NOT_NEGATIVE, help="in place of those in this file")
    add("--seeds", type=COUNT, default=3, help="runs of each optimizer and batch")
    add("--target", type=SHARE, default=0.95, help="validation accuracy to reach")
    add("--output", type=Path, default=Path("runs/digits"), help="folder for what it leaves")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> list[Result]:
    """Trains, reports, and returns the results."""
    sys.stdout.reconfigure(line_buffering=True)  # a line is in the log file when it is printed
    args = parse_arguments(argv)
    data = load_data()
    if (largest := max(args.batch_size) * args.micro_batches) > len(data.train.labels):
        raise SystemExit(
            f"--batch-size times --micro-batches must be at most {len(data.train.labels)}, the "
            f"training examples; got {largest}."
        )
    file, results = Table(args.output / "results.csv"), []
    with tqdm(total=len(args.batch_size) * len(args.optimizer) * args.seeds, disable=None) as bar:
        for batch_size, name in itertools.product(args.batch_size, args.optimizer):
            for result in train(name, batch_size, range(args.seeds), data, args):
                results.append(result)
                file.append(result.row())
                bar.update()
            tqdm.write(one_line(results[-args.seeds :]))
    print(f"\n{table(results)}\n\n{verdict(results)}\n")
    picture = args.output / "curves.png"
    draw(results, args.target, picture)
    print(f"{file.path} has every run, {picture} the curves")
    return results


if __name__ == "__main__":
    main()
