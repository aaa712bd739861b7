"""The recipes of BERT and ResNet-50 against what was published, written down here once more."""

import dataclasses
import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_largebatch as lb
from tests import reference
from tests.recipes.networks import flat, trained

IMAGES = 1281167


def mlperf_bert(peak, begin, warmup, total):
    """Google's BERT: the warm-up replaces the start of a decay that is counted from step 0."""
    return lambda t: peak * ((t - begin) / warmup if t - begin < warmup else max(1 - t / total, 0))


def mlperf_resnet(peak, warmup, decay_steps):
    def rate(t):
        if t < warmup:
            return peak * t / warmup
        return 1e-4 + (peak - 1e-4) * max(1 - (t - warmup) / decay_steps, 0) ** 2

    return rate


def nvidia(peak, warmup, total):
    return lambda t: peak * (t / warmup if t < warmup else max(1 - t / total, 0) ** 0.5)


def lans_paper(peak, warmup, hold, total):
    def rate(t):
        if t < warmup:
            return peak * t / warmup
        return peak * min((total - t) / (total - warmup - hold), 1)

    return rate


def polynomial(peak, power, warmup, total, end=0.0):
    return lambda t: (
        peak * t / warmup
        if t < warmup
        else end + (peak - end) * (1 - (t - warmup) / (total - warmup)) ** power
    )


def goyal(batch_size):
    def rate(t):
        epoch = t * batch_size / IMAGES
        peak = 0.1 * batch_size / 256
        drops = sum(epoch >= drop for drop in (30, 60, 80))
        warmup = round(5 * IMAGES / batch_size)
        return 0.1 + (peak - 0.1) * t / warmup if t < warmup else peak * 0.1**drops

    return rate


# MLCommons, training_5.0.0/rcps_bert.json: batch size, learning rate, steps, steps of warm-up, step
# at which it begins, betas, weight decay.
MLPERF_BERT = [
    (256, 0.00035, 13700, 0, 0, 0.9, 0.999, 0.01),
    (448, 0.000425, 6700, 0, 0, 0.9, 0.999, 0.01),
    (1536, 0.002, 2254, 0, 0, 0.66, 0.996, 0.01),
    (3072, 0.002, 1141, 100, 0, 0.66, 0.998, 0.01),
    (4096, 0.0024, 855, 0, 0, 0.66, 0.998, 0.01),
    (4608, 0.0035, 700, 0, 0, 0.62, 0.9, 0.01),
    (6144, 0.0029293, 700, 0, 0, 0.7206, 0.78921, 0.001),
    (6912, 0.0029293, 700, 0, 0, 0.7206, 0.78921, 0.001),
    (8192, 0.00288293, 600, 287, -76, 0.88, 0.88, 0.0166629),
    (8704, 0.002971656225, 600, 287, -76, 0.88, 0.88, 0.0166629),
    (12288, 0.0031, 500, 300, -100, 0.8, 0.925, 0.0166629),
    (13056, 0.00319540686, 500, 300, -100, 0.8, 0.925, 0.0166629),
    (16384, 0.0033, 600, 290, -100, 0.75, 0.9, 0.0166629),
]

# MLCommons, training_4.0.0/rcps_resnet.json: batch size, learning rate, epochs of warm-up, decay
# steps, epochs of the slowest run, momentum, weight decay.
MLPERF_RESNET = [
    (1632, 7.4, 2, 27476, 37, 0.9, 5e-5),
    (3264, 10.5, 2, 14523, 37, 0.9, 5e-5),
    (4096, 10, 5, 13137, 42, 0.9, 2e-4),
    (8192, 17, 5, 6095, 44, 0.9, 2e-4),
    (13056, 12.8, 9, 4710, 46, 0.9, 2.5e-5),
    (32768, 21.2, 16, 2267, 57, 0.94, 2.5e-5),
    (49152, 19.405, 24, 1846, 69, 0.951807, 1e-4),
    (58880, 23.246, 29, 1785, 81, 0.951807, 1e-4),
    (65536, 24.699, 31, 1133, 86, 0.951807, 1e-4),
    (67840, 24.699, 31, 1133, 87, 0.951807, 1e-4),
]


def points(warmup, total, *more):
    """Both ends, within the warm-up and around its end, and within what follows."""
    within = {0, 1, warmup // 2, max(warmup - 1, 0), warmup, warmup + 1, total}
    return tuple(sorted({*within, (warmup + total) // 2, (warmup + 9 * total) // 10, *more}))


def published_schedules():
    """For each recipe and batch size the published rule, and the steps at which it is checked.

    A length in epochs, or as a part of the run, is rounded to whole steps.
    """
    for size, peak, total, warmup, begin, *_ in MLPERF_BERT:
        steps = points(max(begin + warmup, 0), total)
        yield ("bert-large/lamb/mlperf", size), mlperf_bert(peak, begin, warmup, total), steps
    for size, peak, epochs, decay, slowest, *_ in MLPERF_RESNET:
        warmup = round(epochs * IMAGES / size)
        # Decay steps that end before the slowest run arrived come after the warm-up.
        total = decay + warmup if decay < math.floor(slowest * IMAGES / size) else decay
        rule = mlperf_resnet(peak, warmup, total - warmup)
        yield ("resnet50/lars/mlperf", size), rule, points(warmup, total)
    for size in (512, 1024, 2048, 4096, 8192, 16384, 32768):
        total = 512_000_000 // size
        rule = mlperf_bert(5e-3 * math.sqrt(size / 32768), 0, 3125, total)
        yield ("bert-large/lamb/paper", size), rule, points(3125, total)
    for phase, size, peak, ratio, total in (
        (1, 65536, 6e-3, 0.2843, 7038), (2, 32768, 4e-3, 0.128, 1563)
    ):  # fmt: skip
        warmup = round(ratio * total)
        name = f"bert-large/lamb/nvidia-phase{phase}"
        yield (name, size), nvidia(peak, warmup, total), points(warmup, total)
    for phase, size, peak, ratio, held, total in (
        (1, 98304, 0.00675, 0.4265, 0.2735, 3519), (2, 33792, 0.005, 0.192, 0.108, 782)
    ):  # fmt: skip
        warmup, hold = round(ratio * total), round(held * total)
        steps = points(warmup, total, warmup + hold, warmup + hold + 1)
        name = f"bert-large/lans/paper-phase{phase}"
        yield (name, size), lans_paper(peak, warmup, hold, total), steps
    yield ("resnet50/lamb/you", 32768), polynomial(0.04, 1, 782, 3519), points(782, 3519)
    for size in (512, 1024, 4096, 8192):
        warmup, total = (round(n * IMAGES / size) for n in (2.5 * size / 8192, 90))
        rule = polynomial(16 * math.sqrt(size / 8192), 2, warmup, total)
        yield ("resnet50/lars/square-root", size), rule, points(warmup, total)
    for size in (256, 512, 1024, 2048, 4096, 8192):
        epochs = (0, 2, 4.99, 5.01, 29.99, 30.01, 59.99, 60.01, 79.99, 80.01)
        steps = tuple(round(n * IMAGES / size) for n in epochs)
        yield ("resnet50/sgd/linear", size), goyal(size), steps


SCHEDULES = {key: (rule, steps) for key, rule, steps in published_schedules()}


def small_model(name):
    """Parameters of that kind of network, with the names that Flax gives them."""
    shapes = {"dense": {"kernel": (3, 4), "bias": (4,)}, "norm": {"scale": (4,), "bias": (4,)}}
    if name.startswith("resnet50"):
        shapes["conv"] = {"kernel": (3, 3, 2, 4)}
    leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda node: isinstance(node, tuple))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    arrays = [jax.random.normal(*pair) + 0.5 for pair in zip(keys, leaves, strict=True)]
    return structure.unflatten(arrays)


TEN = sorted({name for name, _ in SCHEDULES})


def test_every_batch_size_has_its_schedule_here():
    assert set(SCHEDULES) == {(name, n) for name in TEN for n in lb.recipes.batch_sizes(name)}
    assert all(len(steps) >= 5 for _, steps in SCHEDULES.values())


@pytest.mark.parametrize(("name", "batch_size"), SCHEDULES)
def test_schedule_is_the_published_one(name, batch_size, x64):
    rule, steps = SCHEDULES[name, batch_size]
    ours = jax.vmap(lb.recipes.get(name, batch_size).schedule())(jnp.asarray(steps))
    expected = [rule(t) for t in steps]
    np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-12 * max(expected))


def test_mlperf_rows_have_the_published_numbers():
    for size, *_, b1, b2, decay in MLPERF_BERT:
        bert = lb.recipes.get("bert-large/lamb/mlperf", size)
        assert (bert.b1, bert.b2, bert.eps, bert.weight_decay) == (b1, b2, 1e-6, decay)
    for size, *_, momentum, decay in MLPERF_RESNET:
        resnet = lb.recipes.get("resnet50/lars/mlperf", size)
        assert (resnet.momentum, resnet.weight_decay) == (momentum, decay)


def kernels(name):
    return "kernel" in name


def sgd(w, gradients, *, lr, wd):
    buffer = np.zeros_like(w)
    for g, rate in zip(gradients, lr, strict=True):
        g = g + wd * w
        buffer = 0.9 * buffer + g
        w = w - rate * (g + 0.9 * buffer)
        yield w


# For each recipe: the formula of its optimizer with the published numbers. Biases and scales are
# neither decayed nor adapted.
FORMULAS = {
    ("bert-large/lamb/mlperf", 256): (reference.lamb, 1.0, {"wd": 0.01, "adapted": kernels}),
    ("bert-large/lamb/paper", 32768): (reference.lamb, None, {"wd": 0.01, "adapted": kernels}),
    ("bert-large/lamb/nvidia-phase1", 65536): (
        reference.lamb, 1.0, {"wd": 0.01, "adapted": kernels}
    ),
    ("bert-large/lamb/nvidia-phase2", 32768): (
        reference.lamb, 1.0, {"wd": 0.01, "adapted": kernels}
    ),
    ("bert-large/lans/paper-phase1", 98304): (reference.lans, None, {"wd": 0.01}),
    ("bert-large/lans/paper-phase2", 33792): (reference.lans, None, {"wd": 0.01}),
    ("resnet50/lamb/you", 32768): (
        reference.lamb, 1.0, {"wd": 1.5, "adapted": kernels, "correction": "none"}
    ),
    ("resnet50/lars/mlperf", 1632): (reference.lars, None, {"wd": 5e-5, "adapted": kernels}),
    ("resnet50/lars/square-root", 512): (
        reference.lars, None,
        {"wd": 1e-4, "adapted": kernels, "eps": 1e-5, "scaled_momentum": False},
    ),
    ("resnet50/sgd/linear", 8192): (sgd, None, {"wd": 1e-4}),
}  # fmt: skip


def test_every_recipe_has_a_formula_here():
    assert {name for name, _ in FORMULAS} == set(TEN)


@pytest.mark.parametrize(("name", "batch_size"), FORMULAS)
def test_optimizer_is_the_published_one(name, batch_size, x64):
    family, bound, switches = FORMULAS[name, batch_size]
    switches = dict(switches)
    decay = switches.pop("wd")
    rule, _ = SCHEDULES[name, batch_size]
    steps = 4
    params = small_model(name)
    waves = jnp.arange(1.0, steps + 1)
    gradients = jax.tree.map(
        lambda p: jnp.sin(p[None] * waves.reshape(-1, *[1] * p.ndim) + 1), params
    )
    ours = flat(trained(lb.recipes.get(name, batch_size).optimizer(), params, gradients))

    start, own = flat(params), flat(gradients)
    if bound is not None:
        own = reference.clip_by_global_norm(own, bound)
    theirs = reference.trajectory(
        family, start, own,
        lr=np.array([rule(t) for t in range(steps)]),
        wd=lambda name: decay if kernels(name) else 0.0,
        **switches,
    )  # fmt: skip
    compared = [name for name in start if family is not reference.lans or kernels(name)]
    assert len(compared) >= 1
    for leaf in compared:
        moved = theirs[leaf][-1] - start[leaf]
        assert np.abs(moved).max() > 0
        np.testing.assert_allclose(ours[leaf] - start[leaf], moved, rtol=2e-3)


def test_lans_leaves_biases_unadapted(x64):
    """The formula above has no such switch: a bias at zero has nothing that it could adapt to."""
    params = jax.tree.map(jnp.zeros_like, small_model("bert"))
    gradients = jax.tree.map(lambda p: jnp.ones((2, *p.shape)), params)
    recipe = lb.recipes.get("bert-large/lans/paper-phase1")
    for mask in (~lb.matching("bias", "scale"), lb.at_least_ndim(2)):
        end = trained(
            recipe.optimizer(mask=mask), jax.tree.map(lambda p: p + 2.0, params), gradients
        )
        rate = float(recipe.schedule()(1))
        np.testing.assert_allclose(end["dense"]["bias"], 2.0 - rate, rtol=1e-6)
        assert np.all(np.abs(end["dense"]["kernel"] - 2.0) > 1.5 * rate)


def test_decay_rates_of_a_row_reach_the_optimizer():
    params = small_model("bert")
    gradients = jax.tree.map(lambda p: jnp.stack([p, -p, jnp.cos(p)]), params)
    recipe = lb.recipes.get("bert-large/lamb/mlperf", 8192)
    mask = ~lb.matching("bias", "scale")
    same = lb.lamb(
        recipe.schedule(), 0.88, 0.88, 1e-6, 0.0, 0.0166629, mask, trust_ratio_mask=mask,
        max_grad_norm=1.0,
    )  # fmt: skip
    ours = trained(recipe.optimizer(), params, gradients)
    jax.tree.map(np.testing.assert_array_equal, ours, trained(same, params, gradients))


@pytest.mark.parametrize("name", TEN)
def test_trains_at_every_size_between_the_published_ones(name):
    """Each builds a schedule that starts, peaks and ends within its bounds."""
    sizes = lb.recipes.batch_sizes(name)
    for batch_size in {
        *sizes,
        *(math.isqrt(a * b) for a, b in itertools.pairwise(sizes)),
    }:
        recipe = lb.recipes.get(name, batch_size)
        schedule = recipe.schedule()
        rates = [float(schedule(round(part * recipe.total_steps / 40))) for part in range(41)]
        assert min(rates) >= 0
        assert 0.6 * recipe.learning_rate < max(rates) <= recipe.learning_rate * (1 + 1e-6)
        assert rates[-1] <= 0.002 * recipe.learning_rate
        assert ("nobody" in recipe.origin) == (batch_size not in sizes)
        assert recipe.origin in recipe.summary()


def test_a_rule_comes_out_of_the_interpolation():
    """Rates that are powers of the batch size, between the sizes of the table."""
    recipe = lb.recipes.get("bert-large/lamb/paper", 3000)
    assert math.isclose(recipe.learning_rate, 5e-3 * math.sqrt(3000 / 32768), rel_tol=1e-12)
    assert recipe.warmup_steps == 3125
    assert recipe.total_steps == round(512e6 / 3000)
    linear = lb.recipes.get("resnet50/sgd/linear", 3000)
    assert math.isclose(linear.learning_rate, 0.1 * 3000 / 256, rel_tol=1e-12)
    assert linear.total_steps == round(90 * IMAGES / 3000)


def test_interpolates_in_the_logarithm_of_the_batch():
    """The geometric mean of two batch sizes lies half-way between them in the logarithm."""
    recipe = lb.recipes.get("bert-large/lamb/mlperf", math.isqrt(8704 * 12288))
    assert math.isclose(recipe.learning_rate, math.sqrt(0.002971656225 * 0.0031), rel_tol=1e-4)
    assert recipe.warmup_begin_step == -88
    assert "between the published batch sizes 8704 and 12288" in recipe.summary()
    # Where one side has no warm-up there is no geometric mean: half of 287.
    assert lb.recipes.get("bert-large/lamb/mlperf", math.isqrt(6912 * 8192)).warmup_steps in (
        143,
        144,
    )


@pytest.mark.parametrize("batch_size", [255, 16385])
def test_refuses_to_go_beyond(batch_size):
    with pytest.raises(ValueError, match=r"batch_size must be within") as caught:
        lb.recipes.get("bert-large/lamb/mlperf", batch_size)
    nearest = min(max(batch_size, 256), 16384)
    for said in ("256, 448", f"got {batch_size}", f"Take {nearest}", "batch_plan"):
        assert said in str(caught.value)
    with pytest.raises(TypeError, match="extrapolate"):
        lb.recipes.get("bert-large/lamb/mlperf", batch_size, extrapolate=True)


def test_a_recipe_is_frozen_plain_and_says_its_source():
    recipe = lb.recipes.get("resnet50/lars/mlperf", 32768)
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.learning_rate = 1.0
    assert json.loads(json.dumps(dataclasses.asdict(recipe)))["momentum"] == 0.94
    assert "rcps_resnet.json" in recipe.source
    for said in (
        recipe.source,
        recipe.note,
        "momentum 0.94",
        "warmup_steps 626",
        "total_steps 2267",
    ):
        assert said in recipe.summary()


def test_batch_sizes():
    assert lb.recipes.batch_sizes("resnet50/sgd/linear") == [256, 512, 1024, 2048, 4096, 8192]
    with pytest.raises(ValueError, match=r"name must be that of a recipe.*resnet50/sgd/linear"):
        lb.recipes.batch_sizes("resnet50/adam")


def test_examples_to_target():
    runs = lb.recipes.examples_to_target("resnet50/lars/mlperf")
    assert runs[32768][:3] == [56 * IMAGES, 56 * IMAGES, 55 * IMAGES]
    with pytest.raises(ValueError, match="name must be one of 'bert-large/lamb/mlperf', 'resnet50"):
        lb.recipes.examples_to_target("resnet50/sgd/linear")
