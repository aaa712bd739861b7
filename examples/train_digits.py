"""Trains a small convolutional network on handwritten digits, at a small and at a large batch.

Without arguments it compares AdamW with LAMB, LANS and LARS at batches of 32 and of 1024, each over
the same examples, in about a minute on two CPU cores:

    python examples/train_digits.py

It prints a table, and leaves it in `runs/digits/results.json` and the curves in
`runs/digits/curves.png`. Other things to try:

    python examples/train_digits.py --optimizer lamb larc --batch-size 64 256 --weight-decay 0.1
    python examples/train_digits.py --optimizer lbsgd --batch-size 32 --macrobatch-size 512
    python examples/train_digits.py --optimizer lamb --batch-size 128 --dtype float16
    python examples/train_digits.py --schedule eden --warmup-strategy sqrt --initializer orthogonal
    python examples/train_digits.py --resume

The last continues a comparison that was interrupted, to the same bits as if it had not been. How
the library is used is in `build_optimizer`, `build_schedule` and `train_step`.
"""

import argparse
from collections.abc import Callable, Sequence
import dataclasses
import json
import math
from pathlib import Path
import shutil
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
import numpy as np
import optax
import orbax.checkpoint as ocp
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import optax_largebatch as lb


class Defaults(NamedTuple):
    """What an optimizer gets where the options say nothing."""

    small_rate: float  # learning rate at a batch of 32
    large_rate: float  # learning rate at a batch of 1024
    weight_decay: float


# The learning rates come from a coarse grid, two values for each factor of ten, with the default
# options and two or three seeds: of those whose final validation accuracy was within a hundredth
# of the best, the one that reached 0.95 in the fewest steps. A finer grid would find a little more.
# The weight decays are customary values and were not tuned.
DEFAULTS = {
    "adamw": Defaults(small_rate=1e-1, large_rate=3e-2, weight_decay=1e-2),
    "lamb": Defaults(small_rate=3e-2, large_rate=1e-1, weight_decay=1e-2),
    "lans": Defaults(small_rate=3e-2, large_rate=1e-1, weight_decay=1e-2),
    "lars": Defaults(small_rate=3e-2, large_rate=1e-1, weight_decay=1e-4),
    "larc": Defaults(small_rate=3e-1, large_rate=3e-1, weight_decay=1e-4),
    "lbsgd": Defaults(small_rate=1e-1, large_rate=3e-1, weight_decay=1e-4),
}
SMALL_BATCH, LARGE_BATCH = 32, 1024

INITIALIZERS = {
    "xavier": jax.nn.initializers.xavier_uniform(),
    "he": jax.nn.initializers.he_normal(),
    "orthogonal": jax.nn.initializers.orthogonal(),
    "normal": jax.nn.initializers.normal(0.1),
    "uniform": jax.nn.initializers.uniform(0.1),
}
DTYPES = ("float32", "float16")
SCHEDULES = ("constant", "steps", "polynomial", "hold-decay", "eden")
WARMUP_STRATEGIES = ("linear", "power2", "sqrt", "lars")

COLOURS = {
    "adamw": "#555555",
    "lamb": "#0072b2",
    "lans": "#d55e00",
    "lars": "#009e73",
    "larc": "#cc79a7",
    "lbsgd": "#e69f00",
}
LINE_STYLES = ("-", "--", ":", "-.")

# What the progress bar shows of `lb.step_metrics`, as far as the optimizer has it.
SHOWN = ("learning_rate", "trust_ratio/median", "loss_scale", "skipped_steps")

# Biases and normalisation scales are neither decayed nor adapted: they start at 0 or 1, and their
# norms do not say how far a step should go.
KERNELS = lb.excluding("bias", "scale")


# Data ---------------------------------------------------------------------------------------------


class Examples(NamedTuple):
    """Images and what they show."""

    images: np.ndarray  # (examples, 8, 8, 1), from 0 to 1
    labels: np.ndarray  # (examples,), from 0 to 9


class Data(NamedTuple):
    """Three parts, each with about the same share of every digit."""

    train: Examples
    validation: Examples
    test: Examples


def load_data() -> Data:
    """The 1797 digits of scikit-learn, split in the same way every time."""
    digits = load_digits()
    rest = Examples(
        (digits.images[..., None] / 16).astype(np.float32), digits.target.astype(np.int32)
    )
    rest, test = hold_out(rest, 300)
    train, validation = hold_out(rest, 300)
    return Data(train, validation, test)


def hold_out(examples: Examples, size: int) -> tuple[Examples, Examples]:
    """All but `size` examples, and these."""
    images, held_images, labels, held_labels = train_test_split(
        *examples, test_size=size, stratify=examples.labels, random_state=0
    )
    return Examples(images, labels), Examples(held_images, held_labels)


def shuffled(num_examples: int, length: int, seed: int) -> np.ndarray:
    """The order of training, (length,): epoch after epoch, each shuffled.

    It does not depend on the batch size, so that all runs see the same examples.
    """
    rng = np.random.default_rng(seed)
    epochs = math.ceil(length / num_examples)
    return np.concatenate([rng.permutation(num_examples) for _ in range(epochs)])[:length]


# Network ------------------------------------------------------------------------------------------


class ConvNet(nnx.Module):
    """Two convolutions and a linear layer.

    The norms are group norms: a batch norm would mix the examples of a micro-batch, and the mean
    gradient of many micro-batches would not be that of one large batch.
    """

    def __init__(self, kernel_init: nnx.Initializer, dtype: str, rngs: nnx.Rngs) -> None:
        every = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        self.conv1 = nnx.Conv(1, 16, (3, 3), kernel_init=kernel_init, **every)
        self.norm1 = nnx.GroupNorm(16, num_groups=4, **every)
        self.conv2 = nnx.Conv(16, 32, (3, 3), kernel_init=kernel_init, **every)
        self.norm2 = nnx.GroupNorm(32, num_groups=4, **every)
        self.linear = nnx.Linear(2 * 2 * 32, 10, kernel_init=kernel_init, **every)

    def __call__(self, images: jax.Array) -> jax.Array:
        """The logits, (examples, 10), of images, (examples, 8, 8, 1)."""
        x = nnx.relu(self.norm1(self.conv1(images)))
        x = nnx.avg_pool(x, (2, 2), strides=(2, 2))
        x = nnx.relu(self.norm2(self.conv2(x)))
        x = nnx.avg_pool(x, (2, 2), strides=(2, 2))
        return self.linear(x.reshape(len(x), -1))


# Optimizer ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    """One line of the table: an optimizer at a batch size."""

    optimizer: str
    batch_size: int
    micro_batches: int  # batches in a step; more than one with --macrobatch-size
    steps: int
    steps_per_epoch: float
    learning_rate: float
    weight_decay: float

    @property
    def name(self) -> str:
        """Name of the folder with the checkpoints."""
        return f"{self.optimizer}-{self.batch_size}"

    @property
    def batch(self) -> str:
        """The examples of a step, as in `128` or `4x32`."""
        micro = f"{self.micro_batches}x" if self.micro_batches > 1 else ""
        return f"{micro}{self.batch_size}"

    @property
    def examples_per_step(self) -> int:
        """The examples of a step, a number."""
        return self.micro_batches * self.batch_size


def plan_runs(args: argparse.Namespace, num_examples: int) -> list[Run]:
    """Every optimizer at every batch size."""
    return [
        plan_run(optimizer, batch_size, args, num_examples)
        for batch_size in args.batch_size
        for optimizer in args.optimizer
    ]


def plan_run(optimizer: str, batch_size: int, args: argparse.Namespace, num_examples: int) -> Run:
    """The options, and the defaults where there are none, for one optimizer and batch size."""
    micro_batches = lb.batch_scale(args.macrobatch_size or batch_size, batch_size)
    steps_per_epoch = num_examples / (micro_batches * batch_size)
    # LBSGD is told the learning rate of a micro-batch and scales it up itself.
    rate_batch = batch_size if optimizer == "lbsgd" else micro_batches * batch_size
    return Run(
        optimizer,
        batch_size,
        micro_batches,
        steps=args.steps or max(1, round(args.epochs * steps_per_epoch)),
        steps_per_epoch=steps_per_epoch,
        learning_rate=given(args.learning_rate, default_rate(optimizer, rate_batch)),
        weight_decay=given(args.weight_decay, DEFAULTS[optimizer].weight_decay),
    )


def given(option: float | None, default: float) -> float:
    """The value of an option, 0 included, or its default."""
    return default if option is None else option


def default_rate(optimizer: str, batch_size: int) -> float:
    """The power of the batch size that goes through the two learning rates of the table."""
    small, large, _ = DEFAULTS[optimizer]
    power = math.log(large / small) / math.log(LARGE_BATCH / SMALL_BATCH)
    return small * (batch_size / SMALL_BATCH) ** power


def build_optimizer(run: Run, args: argparse.Namespace) -> optax.GradientTransformation:
    """The optimizer of a run, to be called once for every micro-batch."""
    rate = build_schedule(run, args)
    decay = {"weight_decay": run.weight_decay, "weight_decay_mask": KERNELS}
    match run.optimizer:
        case "adamw":
            optimizer = optax.adamw(rate, weight_decay=run.weight_decay, mask=KERNELS.mask)
        case "lamb":
            optimizer = lb.lamb(rate, **decay, trust_ratio_mask=KERNELS)
        case "lans":
            optimizer = lb.lans(rate, **decay, trust_ratio_mask=KERNELS)
        case "lars":
            # The leaves that are not adapted move at the learning rate itself. With the paper's
            # coefficient, 0.001, one large enough for the kernels is far too large for them.
            optimizer = lb.lars(rate, **decay, trust_coefficient=0.5, trust_ratio_mask=KERNELS)
        case "larc":
            optimizer = lb.larc(rate, **decay, trust_ratio_mask=KERNELS)
        case "lbsgd":
            optimizer = lb.lbsgd(
                rate,
                momentum=0.9,
                **decay,
                batch_scale=run.micro_batches,
                warmup_strategy=args.warmup_strategy,
                warmup_epochs=args.warmup_epochs,
                updates_per_epoch=run.steps_per_epoch * run.micro_batches,
                trust_ratio_mask=KERNELS,
            )
    if run.micro_batches > 1 and run.optimizer != "lbsgd":
        optimizer = lb.accumulate_gradients(optimizer, every=run.micro_batches)
    if args.dtype == "float16":
        optimizer = lb.master_weights(lb.dynamic_loss_scale(optimizer))
    return optimizer


def build_schedule(run: Run, args: argparse.Namespace) -> optax.Schedule:
    """The learning rate of a run: a warm-up from a hundredth of it, then the chosen schedule."""
    peak = run.learning_rate
    # LBSGD has a warm-up of its own.
    warmup = 0 if run.optimizer == "lbsgd" else round(args.warmup_epochs * run.steps_per_epoch)
    steps = max(1, run.steps - warmup)
    match args.schedule:
        case "constant":
            schedule = optax.constant_schedule(peak)
        case "steps":
            drops = {steps // 2: 0.1, 3 * steps // 4: 0.1}
            schedule = optax.piecewise_constant_schedule(peak, drops)
        case "polynomial":
            schedule = lb.warmup_polynomial(peak, steps, power=args.power)
        case "hold-decay":
            schedule = lb.warmup_hold_decay(peak, 0, steps // 2, steps)
        case "eden":
            schedule = lb.eden(
                peak,
                lr_batches=steps / 4,
                lr_epochs=steps / 4 / run.steps_per_epoch,
                steps_per_epoch=run.steps_per_epoch,
                warmup_batches=0,
            )
    if warmup == 0:
        return schedule
    growth = lb.large_batch_warmup(peak / 100, 100, warmup, args.warmup_strategy)
    return optax.join_schedules([growth, schedule], [warmup])


# Training -----------------------------------------------------------------------------------------


@nnx.jit
def train_step(
    model: ConvNet, optimizer: nnx.Optimizer, images: jax.Array, labels: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Updates the model with one batch; returns the loss before, and what is worth a log."""
    loss_scale = jnp.asarray(optax.tree.get(optimizer.opt_state, "loss_scale", 1.0))

    def scaled_loss_of(model: ConvNet) -> tuple[jax.Array, jax.Array]:
        logits = model(images).astype(jnp.float32)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss_scale * loss, loss

    (_, loss), grads = nnx.value_and_grad(scaled_loss_of, has_aux=True)(model)
    optimizer.update(model, grads)
    return loss, lb.step_metrics(optimizer.opt_state)


@nnx.jit
def accuracy(model: ConvNet, images: jax.Array, labels: jax.Array) -> jax.Array:
    """The share of the images that the model reads correctly."""
    return (model(images).argmax(axis=-1) == labels).mean()


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of a run."""

    run: Run
    model: ConvNet
    losses: np.ndarray  # (steps,), on the examples of the step
    accuracies: np.ndarray  # (steps,), on the validation part; NaN where not evaluated
    test_accuracy: float
    target: float

    @property
    def steps_to_target(self) -> int | None:
        """The first step after which the validation accuracy reached the target."""
        reached = np.flatnonzero(self.accuracies >= self.target)
        return int(reached[0]) + 1 if reached.size else None

    @property
    def examples_to_target(self) -> int | None:
        """The examples seen up to that step."""
        steps = self.steps_to_target
        return None if steps is None else steps * self.run.examples_per_step


def train(run: Run, data: Data, args: argparse.Namespace) -> Result:
    """Trains a network from its last checkpoint, or from the start where there is none."""
    model = ConvNet(INITIALIZERS[args.initializer], args.dtype, nnx.Rngs(args.seed))
    optimizer = nnx.Optimizer(model, build_optimizer(run, args), wrt=nnx.Param)
    losses = np.full(run.steps, np.nan)
    accuracies = np.full(run.steps, np.nan)

    images, labels = data.train
    order = shuffled(len(labels), run.steps * run.examples_per_step, args.seed)
    batches = order.reshape(run.steps, run.micro_batches, run.batch_size)
    with open_checkpoints(run, args) as checkpoints:
        start = restore(checkpoints, model, optimizer, losses, accuracies)
        progress = tqdm(range(start, run.steps), desc=f"{run.optimizer} {run.batch}")
        for step in progress:
            results = [train_step(model, optimizer, images[i], labels[i]) for i in batches[step]]
            losses[step] = np.mean([float(loss) for loss, _ in results])
            _, metrics = results[-1]
            shown = {name: f"{metrics[name]:.3g}" for name in SHOWN if name in metrics}
            progress.set_postfix(shown, refresh=False)
            done = step + 1
            if done % args.evaluate_every == 0 or done == run.steps:
                accuracies[step] = accuracy(model, *data.validation)
            if done % args.checkpoint_every == 0 or done == run.steps:
                save(checkpoints, done, model, optimizer, losses, accuracies)
    test_accuracy = float(accuracy(model, *data.test))
    return Result(run, model, losses, accuracies, test_accuracy, args.target)


# Checkpoints --------------------------------------------------------------------------------------


def open_checkpoints(run: Run, args: argparse.Namespace) -> ocp.CheckpointManager:
    """The checkpoints of a run: of an interrupted one with --resume, else none yet."""
    directory = args.output.absolute() / "checkpoints" / run.name
    if not args.resume:
        shutil.rmtree(directory, ignore_errors=True)
    return ocp.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(max_to_keep=1))


def snapshot(model: ConvNet, optimizer: nnx.Optimizer, *curves: np.ndarray) -> dict[str, Any]:
    """All that a run needs to continue. The order of the examples follows from the seed."""
    return {"state": nnx.state((model, optimizer)), "curves": np.stack(curves)}


def save(
    checkpoints: ocp.CheckpointManager,
    step: int,
    model: ConvNet,
    optimizer: nnx.Optimizer,
    *curves: np.ndarray,
) -> None:
    """Writes a checkpoint in the background; the one before goes when this one is complete."""
    checkpoints.save(step, args=ocp.args.StandardSave(snapshot(model, optimizer, *curves)))


def restore(
    checkpoints: ocp.CheckpointManager,
    model: ConvNet,
    optimizer: nnx.Optimizer,
    *curves: np.ndarray,
) -> int:
    """Reads the last checkpoint, if there is one, and returns its step, else 0."""
    step = checkpoints.latest_step()
    if step is None:
        return 0
    like = ocp.args.StandardRestore(snapshot(model, optimizer, *curves))
    saved = checkpoints.restore(step, args=like)
    nnx.update((model, optimizer), saved["state"])
    for curve, saved_curve in zip(curves, saved["curves"], strict=True):
        curve[:] = saved_curve
    return step


# Reports ------------------------------------------------------------------------------------------


def table(results: Sequence[Result]) -> str:
    """The results as text, one line each."""
    rows = [
        ("optimizer", "batch", "rate", "steps", "to target", "examples to target", "test accuracy"),
        *(
            (
                result.run.optimizer,
                result.run.batch,
                f"{result.run.learning_rate:.2g}",
                f"{result.run.steps}",
                f"{result.steps_to_target or 'never'}",
                f"{result.examples_to_target or 'never'}",
                f"{result.test_accuracy:.3f}",
            )
            for result in results
        ),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def write_results(results: Sequence[Result], args: argparse.Namespace) -> None:
    """The options and the results as JSON; --resume reads the options."""
    args.output.mkdir(parents=True, exist_ok=True)
    content = {
        "options": options(args),
        "runs": [
            {
                **dataclasses.asdict(result.run),
                "steps_to_target": result.steps_to_target,
                "examples_to_target": result.examples_to_target,
                "test_accuracy": result.test_accuracy,
            }
            for result in results
        ],
    }
    unfinished = results_file(args).with_suffix(".tmp")  # for the case of being killed just now
    unfinished.write_text(json.dumps(content, indent=2) + "\n")
    unfinished.replace(results_file(args))


def results_file(args: argparse.Namespace) -> Path:
    """Where the results are."""
    return args.output / "results.json"


def plot(results: Sequence[Result], args: argparse.Namespace) -> None:
    """Draws loss and accuracy, by steps on the left and by examples on the right."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, 2, sharex="col", sharey="row")
    for result in results:
        style = line_style(result.run, args)
        for (upper, lower), unit in zip(axes.T, (1, result.run.examples_per_step), strict=True):
            steps, losses = by_epoch(result)
            upper.plot(steps * unit, losses, **style)
            steps = np.flatnonzero(~np.isnan(result.accuracies)) + 1
            lower.plot(steps * unit, result.accuracies[steps - 1], **style)
    for axis in axes.flat:
        axis.set(xscale="log")
        axis.grid(color="#e5e5e5")
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[1]:
        axis.axhline(args.target, color="black", linewidth=0.8)
        axis.annotate(
            f"target {args.target:g}",
            (0.01, args.target),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
        )
    axes[0, 0].set(ylabel="training loss, mean of an epoch", yscale="log")
    axes[1, 0].set(ylabel="validation accuracy", xlabel="steps")
    axes[1, 1].set(xlabel="examples seen")
    figure.legend(
        handles=legend(results, args), loc="outside upper center", ncols=10, frameon=False
    )
    figure.savefig(args.output / "curves.png", dpi=150)


def line_style(run: Run, args: argparse.Namespace) -> dict[str, Any]:
    """A colour for each optimizer, a pattern for each batch size."""
    pattern = LINE_STYLES[args.batch_size.index(run.batch_size) % len(LINE_STYLES)]
    return {"color": COLOURS[run.optimizer], "linestyle": pattern, "linewidth": 1.5}


def by_epoch(result: Result) -> tuple[np.ndarray, np.ndarray]:
    """The last step of each epoch and the mean loss of its steps: the single ones are noisy."""
    steps = len(result.losses)
    length = min(steps, max(1, round(result.run.steps_per_epoch)))
    whole = steps // length
    means = result.losses[: whole * length].reshape(whole, length).mean(axis=1)
    return np.arange(1, whole + 1) * length, means


def legend(results: Sequence[Result], args: argparse.Namespace) -> list[Line2D]:
    """First the colours, then the patterns."""
    colours = {result.run.optimizer: {"color": COLOURS[result.run.optimizer]} for result in results}
    patterns = {
        f"batch {result.run.batch}": {**line_style(result.run, args), "color": "black"}
        for result in results
    }
    return [Line2D([], [], label=label, **style) for label, style in (colours | patterns).items()]


# Options ------------------------------------------------------------------------------------------


def number(
    kind: type[int] | type[float], allowed: str, is_allowed: Callable[[Any], bool]
) -> Callable[[str], Any]:
    """An argparse type: the numbers for which `is_allowed` is true, in words `allowed`."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not is_allowed(value):
            raise argparse.ArgumentTypeError(f"must be {allowed}, got {text!r}")
        return value

    return parse


COUNT = number(int, "a whole number of 1 or more", lambda value: value >= 1)
SEED = number(int, "a whole number from 0 to 4294967295", lambda value: 0 <= value < 2**32)
NOT_NEGATIVE = number(float, "a number of 0 or more", lambda value: 0 <= value < math.inf)
POSITIVE = number(float, "a positive number", lambda value: 0 < value < math.inf)
SHARE = number(float, "a number from 0 to 1", lambda value: 0 <= value <= 1)


def build_parser() -> argparse.ArgumentParser:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description="Compares optimizers on handwritten digits, at a small and at a large batch."
    )
    add = parser.add_argument
    add(
        "--optimizer",
        nargs="+",
        choices=tuple(DEFAULTS),
        default=["adamw", "lamb", "lans", "lars"],
        help="one or more (default: adamw lamb lans lars)",
    )
    add(
        "--batch-size",
        nargs="+",
        type=COUNT,
        default=[SMALL_BATCH, LARGE_BATCH],
        metavar="N",
        help="examples in a batch, one or more (default: 32 1024)",
    )
    add(
        "--macrobatch-size",
        type=COUNT,
        metavar="N",
        help="examples for a step: takes one step for the mean gradient of as many batches "
        "(default: a step for every batch)",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--epochs",
        type=POSITIVE,
        default=40.0,
        metavar="X",
        help="passes through the training examples (default: %(default)g)",
    )
    length.add_argument("--steps", type=COUNT, metavar="N", help="steps, in place of --epochs")
    add(
        "--learning-rate",
        type=NOT_NEGATIVE,
        metavar="X",
        help="for all optimizers and batches (default: from a table in this file)",
    )
    add(
        "--weight-decay",
        type=NOT_NEGATIVE,
        metavar="X",
        help="for all optimizers (default: from a table in this file)",
    )
    add(
        "--schedule",
        choices=SCHEDULES,
        default="polynomial",
        help="the learning rate after the warm-up (default: %(default)s)",
    )
    add(
        "--power",
        type=POSITIVE,
        default=1.0,
        metavar="X",
        help="power of the polynomial schedule (default: %(default)g, a straight line to 0)",
    )
    add(
        "--warmup-epochs",
        type=NOT_NEGATIVE,
        default=5.0,
        metavar="X",
        help="length of the warm-up (default: %(default)g)",
    )
    add(
        "--warmup-strategy",
        choices=WARMUP_STRATEGIES,
        default="linear",
        help="shape of the warm-up; lars, for lbsgd alone, adapts every layer instead "
        "(default: %(default)s)",
    )
    add(
        "--initializer",
        choices=tuple(INITIALIZERS),
        default="he",
        help="how the kernels begin (default: %(default)s)",
    )
    add(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="of parameters and activations; float16 is trained with a loss scale and with float32 "
        "masters (default: %(default)s)",
    )
    add(
        "--target",
        type=SHARE,
        default=0.95,
        metavar="X",
        help="validation accuracy to reach (default: %(default)g)",
    )
    add(
        "--evaluate-every",
        type=COUNT,
        default=1,
        metavar="N",
        help="steps from one evaluation to the next (default: %(default)d)",
    )
    add(
        "--checkpoint-every",
        type=COUNT,
        default=500,
        metavar="N",
        help="steps from one checkpoint to the next (default: %(default)d)",
    )
    add(
        "--seed",
        type=SEED,
        default=0,
        metavar="N",
        help="of the first parameters and of the order of the examples (default: %(default)d)",
    )
    add(
        "--output",
        type=Path,
        default=Path("runs/digits"),
        metavar="DIR",
        help="where results, curves and checkpoints go (default: %(default)s)",
    )
    add(
        "--resume",
        action="store_true",
        help="continue the interrupted comparison in --output, with the same options",
    )
    return parser


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked; wrong ones end the program with a message."""
    parser = build_parser()
    args = parser.parse_args(argv)
    others = [optimizer for optimizer in args.optimizer if optimizer != "lbsgd"]
    if args.warmup_strategy == "lars" and others:
        parser.error(
            "argument --warmup-strategy: 'lars' is for --optimizer lbsgd alone, got it with "
            f"{', '.join(others)}; the others take linear, power2 or sqrt"
        )
    if args.macrobatch_size and args.macrobatch_size < max(args.batch_size):
        parser.error(
            "argument --macrobatch-size: must be no less than each --batch-size, got "
            f"{args.macrobatch_size} with {max(args.batch_size)}"
        )
    if args.resume:
        check_resumable(parser, args)
    return args


def check_resumable(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Checks that there is a comparison to continue, and that it had the same options."""
    if not results_file(args).exists():
        parser.error(f"argument --resume: there is nothing to continue in --output {args.output}")
    before = json.loads(results_file(args).read_text())["options"]
    for name, value in options(args).items():
        if before.get(name) != value:
            parser.error(
                f"argument --resume: --{name.replace('_', '-')} must be what it was when the "
                f"comparison in {args.output} began, {before.get(name)!r}; got {value!r}"
            )


def options(args: argparse.Namespace) -> dict[str, Any]:
    """What decides the numbers of a run, and has to stay the same when it is continued."""
    return {name: value for name, value in vars(args).items() if name not in ("output", "resume")}


def main(argv: Sequence[str] | None = None) -> list[Result]:
    """Trains, reports, and returns the results."""
    args = parse_arguments(argv)
    data = load_data()
    results = []
    write_results(results, args)
    for run in plan_runs(args, len(data.train.labels)):
        results.append(train(run, data, args))
        write_results(results, args)
    plot(results, args)
    print(table(results))
    return results


if __name__ == "__main__":
    main()
