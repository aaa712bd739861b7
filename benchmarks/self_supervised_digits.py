"""Barlow Twins on scikit-learn's digits: LARS by its recipe against tuned LARS, SGD and AdamW.

    python -m benchmarks.self_supervised_digits --output benchmarks/results/cpu-2-cores \
        --guide docs/details/self_supervised_digits.md

At each batch size an encoder is pretrained on 1024 images without their labels, for the same number
of epochs, with the schedule of the recipe. Then a linear probe is fitted to its features and the
labels of 100 of the images. SGD, AdamW and LARS get their learning rate from a grid, by the probe's
accuracy on validation images with seeds that the comparison does not use; LARS by the recipe gets
none. The table has the accuracy on test images, mean and standard deviation over five seeds. Writes
`self_supervised_digits.csv`, and with --guide the table of the page. Takes ten minutes on one core.
"""

import argparse
from collections.abc import Callable, Sequence
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.ndimage import map_coordinates
import numpy as np
import optax
from sklearn.datasets import load_digits

from benchmarks.harness.pages import markdown, with_table
from benchmarks.harness.results import add_output, read, report
from benchmarks.tuned.bert import dense
import optax_largebatch as lb

NAME = "self_supervised_digits"
BATCH_SIZES = (64, 128, 256, 512, 1024)
TRAIN, LABELLED, VALIDATION = 1024, 100, 386
EPOCHS, SEEDS = 40, 5
MOST_RATES = 5
"""How many times rates are tried: those of the grid, and then its extensions."""
WIDTH, FEATURES = 128, 64
OFF_DIAGONAL = 0.0051
"""The weight of the features' redundancy in the loss, as in the paper."""

Params = dict[str, dict[str, jax.Array]]


class Images(NamedTuple):
    """Images of 8 x 8 numbers from 0 to 1, and their labels."""

    train: tuple[jax.Array, jax.Array]
    validation: tuple[jax.Array, jax.Array]
    test: tuple[jax.Array, jax.Array]


class Arm(NamedTuple):
    """One line of the table."""

    optimizer: Callable[[int, int, Params], optax.GradientTransformation]
    """The optimizer, from batch size, epochs and parameters; its learning rate is 1, or the
    recipe's."""
    rates: tuple[float, ...]
    """The factors of the learning rate with which the grid begins."""
    factor: float
    """The factor from one rate of the grid to the next."""


class Row(NamedTuple):
    """An optimizer at a batch size."""

    line: str
    batch_size: int
    rate: float
    accuracy: float
    deviation: float


def recipe(batch_size: int, epochs: int) -> lb.recipes.Recipe:
    """The recipe of Barlow Twins, for the number of training images."""
    return lb.recipes.get("barlow-twins", batch_size, epochs=epochs, examples=TRAIN)


def schedule(batch_size: int, epochs: int) -> optax.Schedule:
    """The recipe's schedule, with a peak of 1."""
    by_recipe = recipe(batch_size, epochs)
    return lambda step: by_recipe.schedule()(step) / by_recipe.learning_rate


KERNELS = ~lb.matching_kinds("bias", "norm")
ARMS = {
    "LARS, rate tuned": Arm(
        lambda batch_size, epochs, params: recipe(batch_size, epochs).optimizer(params),
        (1.0, 4.0, 16.0),  # times the recipe's
        4.0,
    ),
    "SGD, rate tuned": Arm(
        lambda batch_size, epochs, params: optax.sgd(schedule(batch_size, epochs), momentum=0.9),
        (0.001, 0.003, 0.009),
        3.0,
    ),
    "AdamW, rate tuned": Arm(
        lambda batch_size, epochs, params: optax.adamw(
            schedule(batch_size, epochs), weight_decay=1e-4, mask=KERNELS.mask
        ),
        (0.003, 0.009, 0.027),
        3.0,
    ),
}
BY_RECIPE = "LARS by the recipe"
UNTRAINED, PIXELS = "untrained encoder", "pixels"


def images() -> Images:
    """The digits, shuffled once."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    pixels = jnp.asarray(digits.images[order] / 16, "float32")
    labels = jnp.asarray(digits.target[order], "int32")
    ends = (TRAIN, TRAIN + VALIDATION)
    return Images(*zip(jnp.split(pixels, ends), jnp.split(labels, ends), strict=True))


def initial(key: jax.Array) -> Params:
    """An encoder of two layers and a projector of two."""
    sizes = {
        "encoder_0": (64, WIDTH), "encoder_1": (WIDTH, FEATURES),
        "projector_0": (FEATURES, WIDTH), "projector_1": (WIDTH, WIDTH),
    }  # fmt: skip
    params: Params = {}
    for own, (name, shape) in zip(jax.random.split(key, 4), sizes.items(), strict=True):
        kernel = jax.random.normal(own, shape) * jnp.sqrt(2 / shape[0])
        params[name] = {"kernel": kernel, "bias": jnp.zeros(shape[1])}
        if name.endswith("_0"):
            scale = jnp.ones(shape[1])
            params[f"{name}_norm"] = {"scale": scale, "bias": jnp.zeros(shape[1])}
    return params


def encoded(params: Params, pixels: jax.Array) -> jax.Array:
    """The features of images."""
    x = dense(pixels.reshape(len(pixels), -1), params["encoder_0"])
    x = jax.nn.relu(affine(params["encoder_0_norm"], standardized(x, axis=1)))
    return jax.nn.relu(dense(x, params["encoder_1"]))


def projected(params: Params, features: jax.Array) -> jax.Array:
    """The projected features that the loss compares, standardized over the batch."""
    x = dense(features, params["projector_0"])
    x = jax.nn.relu(affine(params["projector_0_norm"], standardized(x, axis=0)))
    return standardized(dense(x, params["projector_1"]), axis=0)


def affine(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Scale and shift after a normalisation."""
    return x * layer["scale"] + layer["bias"]


def standardized(x: jax.Array, axis: int) -> jax.Array:
    """The numbers scaled to mean 0 and variance 1."""
    return (x - x.mean(axis, keepdims=True)) / (x.std(axis, keepdims=True) + 1e-3)


def augmented(key: jax.Array, pixels: jax.Array) -> jax.Array:
    """Each image turned, stretched, sheared, shifted, and brighter or darker."""
    rows, columns = jnp.meshgrid(jnp.arange(8.0) - 3.5, jnp.arange(8.0) - 3.5, indexing="ij")

    def view(image: jax.Array, amounts: jax.Array) -> jax.Array:
        angle, tall, wide, sheared, up, left, bright = amounts
        sine, cosine = jnp.sin(0.4 * angle), jnp.cos(0.4 * angle)
        y = (cosine * rows - sine * columns) * (1 + 0.2 * tall) + 0.2 * sheared * columns + up
        x = (sine * rows + cosine * columns) * (1 + 0.2 * wide) + left
        return map_coordinates(image, [y + 3.5, x + 3.5], order=1) * (1 + 0.3 * bright)

    return jax.vmap(view)(
        pixels, jax.random.uniform(key, (len(pixels), 7), minval=-1.0, maxval=1.0)
    )


def loss(params: Params, key: jax.Array, pixels: jax.Array) -> jax.Array:
    """The loss of Barlow Twins: two views of an image alike, features not redundant."""
    one, other = (
        projected(params, encoded(params, augmented(own, pixels))) for own in jax.random.split(key)
    )
    correlation = one.T @ other / len(pixels)
    diagonal = jnp.diag(correlation)
    alike = jnp.sum((1 - diagonal) ** 2)
    return alike + OFF_DIAGONAL * (jnp.sum(correlation**2) - jnp.sum(diagonal**2))


def probed(encode: Callable[[jax.Array], jax.Array], given: Images) -> jax.Array:
    """The accuracies of a linear probe on validation and test images, by least squares."""
    seen = encode(given.train[0])
    mean, deviation = seen.mean(axis=0), seen.std(axis=0) + 1e-3

    def inputs(pixels: jax.Array) -> jax.Array:
        found = (encode(pixels) - mean) / deviation
        return jnp.concatenate([found, jnp.ones((len(found), 1))], axis=1)

    x, labels = inputs(given.train[0][:LABELLED]), jax.nn.one_hot(given.train[1][:LABELLED], 10)
    weights = jnp.linalg.solve(x.T @ x + 10 * jnp.eye(x.shape[1]), x.T @ labels)
    right = [
        jnp.mean(jnp.argmax(inputs(own) @ weights, axis=1) == own_labels)
        for own, own_labels in (given.validation, given.test)
    ]
    return jnp.nan_to_num(jnp.stack(right))


def trained(arm: Arm, batch_size: int, epochs: int, given: Images) -> Callable[..., jax.Array]:
    """A compiled function from a rate and seeds to the accuracies of each seed."""
    pixels = given.train[0]
    steps = recipe(batch_size, epochs).total_steps

    def one(rate: jax.Array, seed: jax.Array) -> jax.Array:
        start, training = jax.random.split(jax.random.key(seed))
        params = initial(start)
        optimizer = optax.chain(arm.optimizer(batch_size, epochs, params), optax.scale(rate))

        def step(carry: Any, key: jax.Array) -> tuple[Any, None]:
            params, state = carry
            chosen, views = jax.random.split(key)
            rows = jax.random.permutation(chosen, TRAIN)[:batch_size]
            gradients = jax.grad(loss)(params, views, pixels[rows])
            updates, state = optimizer.update(gradients, state, params)
            return (optax.apply_updates(params, updates), state), None

        keys = jax.random.split(training, steps)
        (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), keys)
        return probed(functools.partial(encoded, params), given)

    return jax.jit(jax.vmap(one, (None, 0)))


def compared(batch_sizes: Sequence[int], epochs: int, seeds: int) -> list[Row]:
    """One row for each line of the table and batch size."""
    given = images()
    rows = []
    for batch_size in batch_sizes:
        for name, arm in ARMS.items():
            run = trained(arm, batch_size, epochs, given)
            rates = {name: tuned(run, arm, seeds)}
            if name.startswith("LARS"):
                rates = {BY_RECIPE: 1.0} | rates
            for line, rate in rates.items():
                test = run(jnp.asarray(rate), jnp.arange(seeds))[:, 1]
                rows.append(_row(line, batch_size, rate, test))
    params = [initial(jax.random.key(seed)) for seed in range(seeds)]
    untrained = [probed(functools.partial(encoded, own), given)[1] for own in params]
    flat = [probed(lambda pixels: pixels.reshape(len(pixels), -1), given)[1]]
    for line, own in ((UNTRAINED, untrained), (PIXELS, flat)):
        rows += [_row(line, size, 0.0, own) for size in batch_sizes]
    return rows


def tuned(run: Callable[..., jax.Array], arm: Arm, seeds: int) -> float:
    """The best rate on validation images. Where it is at an edge, the grid grows beyond it."""
    found: dict[float, float] = {}
    rates = list(arm.rates)
    for _ in range(MOST_RATES):
        for rate in set(rates) - set(found):
            validation = run(jnp.asarray(rate), 1000 + jnp.arange(seeds))[:, 0]
            found[rate] = float(validation.mean())
        best = max(found, key=found.__getitem__)
        if best not in (min(found), max(found)):
            return best
        rates = [best * arm.factor if best == max(found) else best / arm.factor]
    return best


def _row(line: str, batch_size: int, rate: float, test: Any) -> Row:
    deviation = np.std(test, ddof=1) if len(test) > 1 else 0
    numbers = (float(f"{rate:.2g}"), round(float(np.mean(test)), 4), round(float(deviation), 4))
    return Row(line, batch_size, *numbers)


def table(rows: Sequence[Row]) -> str:
    """Accuracy by line and batch size, in Markdown; the rate, or its factor, in brackets."""
    lines = []
    for name in (BY_RECIPE, *ARMS, UNTRAINED, PIXELS):
        cells = [
            f"{100 * row.accuracy:.1f} ± {100 * row.deviation:.1f}"
            + (f" ({row.rate:.2g})" if name in ARMS else "")
            for row in rows
            if row.line == name
        ]
        lines.append([name, *cells])
    sizes = dict.fromkeys(row.batch_size for row in rows)
    return markdown(["", *(f"batch {size}" for size in sizes)], lines)


def main() -> None:
    """Runs everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_output(parser, NAME)
    parser.add_argument("--guide", type=Path, help="the page whose table to write")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=BATCH_SIZES)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    options = parser.parse_args()
    rows = compared(options.batch_sizes, options.epochs, options.seeds)
    report([row._asdict() for row in rows], options.output / f"{NAME}.csv")
    rows = read(options.output / f"{NAME}.csv", Row)
    if options.guide is not None:
        page = with_table(options.guide.read_text(), "digits", f"benchmarks.{NAME}", table(rows))
        options.guide.write_text(page)


if __name__ == "__main__":
    main()
