"""The recipes of training repositories: schedules, steps and exclusions, written down once more."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_largebatch as lb
from tests import reference
from tests.recipes import networks
from tests.recipes.networks import at_step, trained
from tests.recipes.test_recipes import TEN, points, polynomial

IMAGES = 1281167


class Run(NamedTuple):
    """A published run: how it is asked for, its schedule as a formula, and where to look at it."""

    name: str
    asked: dict
    rate: object
    steps: tuple[int, ...]

    def __repr__(self):
        return "-".join([self.name, *map(str, self.asked.values())])


def cosine(peak, warmup, total, *, begin=0.0, end=0.0):
    def rate(t):
        if t < warmup:
            return begin + (peak - begin) * t / warmup
        part = min((t - warmup) / (total - warmup), 1)
        return end + (peak - end) * 0.5 * (1 + math.cos(math.pi * part))

    return rate


def timm(peak, epochs, warmup, of_epoch, *, begin=1e-6, end=1e-5):
    """timm's cosine: once in an epoch, over all epochs, the first ones replaced by a warm-up."""

    def rate(t):
        epoch = t // of_epoch
        if epoch >= epochs:
            return end
        if epoch < warmup:
            return begin + epoch * (peak - begin) / warmup
        return end + 0.5 * (peak - end) * (1 + math.cos(math.pi * epoch / epochs))

    return rate


def swav(epochs, of_epoch=312, warmup=10, *, base=4.8, start=0.3, last=0.0048):
    """As main_swav.py makes it: a linspace, and a cosine over the steps that are left."""
    grown = np.linspace(start, base, of_epoch * warmup)
    left = of_epoch * (epochs - warmup)
    waves = [last + 0.5 * (base - last) * (1 + math.cos(math.pi * t / left)) for t in range(left)]
    table = np.concatenate([grown, waves, [last]])
    return lambda t: table[t]


def eva(peak, total):
    """As scheduler.py of EVA: the warm-up counts its steps from 1, the cosine from 0."""
    after = cosine(peak, 2000, total)
    return lambda t: peak * (t + 1) / 2000 if t < 2000 else after(t)


def half_constant(peak, total):
    half = total // 2
    after = cosine(peak, 0, total - half)
    return lambda t: peak if t < half else after(t - half)


def albert(t):
    return 0.00176 * (t / 3125 if t < 3125 else 1 - t / 125000)


def fastpitch(t):
    return 0.1 * (t / 1000**1.5 if t < 1000 else t**-0.5)


def zipformer(t):
    fallen = (1 + (t / 7500) ** 2) * (1 + (t // 2500 / 3.5) ** 2)
    return 0.045 * min(0.1 + 0.9 * t / 500, 1) * fallen**-0.25


def published():
    """Every run, from the numbers of its source."""
    big = 4096
    simclr_total = IMAGES * 100 // big + 1
    yield "resnet50/lars/simclr", {}, cosine(0.075 * 64, 3127, simclr_total), (3127, simclr_total)
    given = {"batch_size": 1024, "epochs": 200}
    total, warmup = IMAGES * 200 // 1024 + 1, 10 * IMAGES // 1024
    yield "resnet50/lars/simclr-linear", given, cosine(1.2, warmup, total), (warmup, total)
    given = {"weight_decay": 1e-4, "warmup_steps": 500}
    total = IMAGES * 800 // big + 1
    yield "resnet50/lars/simclr-v2", given, cosine(6.4, 500, total), (500, total)
    total = 12811 * 60 // 1024 + 1
    yield "simclr-v2-fine-tune", {"examples": 12811}, cosine(0.16, 0, total), (0, total)
    for epochs, base in ((40, 0.45), (100, 0.45), (300, 0.3), (1000, 0.2)):
        warmup, total = 10 * IMAGES // big, epochs * IMAGES // big
        rate = cosine(base * big / 256, warmup, total)
        yield "resnet50/lars/byol", {"epochs": epochs}, rate, (warmup, total)
    total, warmup = round(100 * IMAGES / big), round(IMAGES / big)
    yield "resnet50/lars/detcon-b", {}, cosine(3.2, warmup, total), (warmup, total)
    for epochs in (100, 200, 400, 800):
        yield "swav", {"epochs": epochs}, swav(epochs), (3120, 312 * epochs)
    for epochs in (400, 800):
        yield "deepcluster-v2", {"epochs": epochs}, swav(epochs), (3120, 312 * epochs)
    for epochs in (200, 400):
        rate = swav(epochs, 5004, 0, base=0.6, last=0.0006)
        yield "swav-small-batch", {"epochs": epochs}, rate, (0, 5004 * epochs)
    rate = cosine(1.6, 6260, 626000, end=0.0016)
    yield "barlow-twins", {}, rate, (6260, 626000)
    for size, base in ((128, 0.7), (256, 0.4), (512, 0.3), (1024, 0.25), (2048, 0.2), (4096, 0.2)):
        epoch, peak = math.ceil(IMAGES / size), base * size / 256
        rate = cosine(peak, 10 * epoch, 300 * epoch, end=0.001 * peak)
        given = {"batch_size": size, "bias_learning_rate": 0.01}
        yield "barlow-twins-batch-sizes", given, rate, (10 * epoch, 300 * epoch)
    for size, epochs, base in ((2048, 1000, 0.2), (512, 100, 0.3), (2048, 100, 0.3)):
        warmup, total = (round(n * IMAGES / size) for n in (10, epochs))
        peak = base * size / 256
        rate = cosine(peak, warmup, total, end=0.001 * peak)
        yield "vicreg", {"batch_size": size, "epochs": epochs}, rate, (warmup, total)
    for epochs, peak in ((100, 9.6), (300, 4.8), (1000, 4.8)):
        yield "moco-v3", {"epochs": epochs}, cosine(peak, 3120, 312 * epochs), (3120, 312 * epochs)
    warmup, total = round(10 * IMAGES / big), round(100 * IMAGES / big)
    yield "vissl-simclr", {}, cosine(4.8, warmup, total, begin=0.6), (warmup, total)
    rate = timm(1.6, 90, 0, 313, end=0.0)
    yield "linear-probe/larc/simsiam", {}, rate, (313, 90 * 313)
    warmup, total = round(10 * IMAGES / 16384), round(90 * IMAGES / 16384)
    yield "linear-probe/lars/mae", {}, cosine(6.4, warmup, total), (warmup, total)
    warmup, total = round(10 * IMAGES / 16000), round(90 * IMAGES / 16000)
    for pixels, peak in ((224, 1.0), (336, 0.6)):
        yield f"eva-clip-{pixels}", {}, cosine(peak, warmup, total), (warmup, total)
    for name, size, epochs, peak in (
        ("eva01-g14-plus", 112 * 1024, 100, 4e-4), ("eva02-b16", 64 * 2048, 200, 2e-4),
        ("eva02-l14", 128 * 1024, 100, 4e-4), ("eva02-l14-336", 128 * 480, 50, 4e-4),
        ("eva02-e14", 144 * 800, 100, 4e-4), ("eva02-e14-plus", 144 * 1000, 100, 4e-4),
    ):  # fmt: skip
        total = round(epochs * 40e6 / size)
        yield name, {}, eva(peak, total), (2000, total)
    for name, peak in (("vit-s16/lamb/deit-iii", 0.004), ("vit-b16/lamb/deit-iii", 0.003)):
        yield name, {}, timm(peak, 800, 5, 625), (5 * 625, 800 * 625)
    for epochs in (90, 240):
        given = {"epochs": epochs, "examples": 11_000_000}
        epoch = 11_000_000 // 2048
        rate = timm(0.001, epochs, 5, epoch)
        yield "vit/lamb/deit-iii-21k", given, rate, (5 * epoch, epochs * epoch)
    yield "deit-iii-21k-fine-tune", {}, timm(0.0003, 50, 5, 625), (5 * 625, 50 * 625)
    for letter, epochs, peak in (("a1", 600, 0.005), ("a2", 300, 0.005), ("a3", 100, 0.008)):
        warmup, total = (round(n * IMAGES / 2048) for n in (5, epochs))
        rate = cosine(peak, warmup, total, begin=1e-4 * peak, end=1e-6)
        yield f"strikes-back-{letter}", {}, rate, (warmup, total)
    yield "caformer/lamb/metaformer", {}, timm(0.008, 300, 20, 313), (20 * 313, 300 * 313)
    total = 30 * 1251
    yield "metaformer-fine-tune", {"weight_decay": 0.05}, lambda t: 1e-4, (0, total)
    total = 110 * IMAGES // 1024
    rate = half_constant(0.002, total)
    yield "perceiver-io/lamb/deepmind", {"batch_size": 1024}, rate, (total // 2, total)
    yield "albert/lamb/google", {}, albert, (3125, 125000)
    for phase, peak, warmup, total in ((1, 0.006, 2000, 10000), (2, 0.004, 200, 933)):
        rate = polynomial(peak, 0.5, warmup, total)
        yield f"electra-base/lamb/nvidia-phase{phase}", {}, rate, (warmup, total)
    for phase, peak, warmup, total in ((1, 0.005, 2166, 95040), (2, 0.004, 200, 7560)):
        rate = polynomial(peak, 1, warmup, total, 1e-7)
        yield f"bart/lamb/nvidia-phase{phase}", {}, rate, (warmup, total)
    for name, peak, end, warmup, total in (
        ("nvidia-base", 0.01, 0.001, 1000, 40000), ("nvidia-large", 0.01, 0.0001, 16000, 100000),
        ("nvidia-large-multi-node", 0.02, 0.0002, 16000, 25000),
    ):  # fmt: skip
        yield name, {}, cosine(peak, warmup, total, end=end), (warmup, total)
    yield "zipformer", {"batch_size": 4000, "examples": 10**7}, zipformer, (500, 125_000)
    total = 1000 * (12500 // 256)
    yield "fastpitch/lamb/nvidia", {"examples": 12500}, fastpitch, (1000, total)
    for size, peak, hold, gamma, warmup in (
        (512, 0.0062, 11, 0.915, 1), (1024, 0.007447, 17, 0.9037, 3), (1536, 0.0072, 26, 0.92, 5),
        (2048, 0.007, 33, 0.939, 6), (3072, 0.009, 40, 0.94, 9), (6144, 0.014, 40, 0.97, 16),
    ):  # fmt: skip
        epoch = 280_000 // size
        yield (
            "rnnt/lamb/mlperf",
            {"batch_size": size, "examples": 280_000, "epochs": 300},
            rnnt(peak, hold, gamma, warmup, epoch),
            (warmup * epoch, 300 * epoch, *(epoch * (warmup + hold + n) + 5 for n in (-1, 0, 1))),
        )


def rnnt(peak, hold, gamma, warmup, of_epoch):
    def rate(t):
        if t < warmup * of_epoch:
            return peak * (t + 1) / (warmup * of_epoch + 1)
        after = t // of_epoch - warmup - hold
        return max(peak * gamma ** (after + 1), 1e-5) if after >= 0 else peak

    return rate


def full_name(part):
    (name,) = [own for own in lb.recipes.names() if part in (own, *own.split("/"))]
    return name


RUNS = [
    Run(full_name(name), asked, rate, points(*steps)) for name, asked, rate, steps in published()
]


def test_every_recipe_is_here():
    # test_recipes.py, test_muon_recipes.py and test_ramps.py have the others.
    elsewhere = {*TEN, *lb.recipes.names("muon"), *lb.recipes.names("ramps")}
    assert sorted({run.name for run in RUNS}) == sorted(set(lb.recipes.names()) - elsewhere)
    assert len(lb.recipes.names()) >= 30


@pytest.mark.parametrize("run", RUNS, ids=repr)
def test_schedule_is_that_of_the_source(run, x64):
    recipe = lb.recipes.get(run.name, **run.asked)
    assert len(run.steps) >= 5
    ours = jax.vmap(recipe.schedule())(jnp.asarray(run.steps))
    expected = [run.rate(t) for t in run.steps]
    np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-12 * max(expected))
    assert recipe.total_steps == run.steps[-1]


def test_biases_of_barlow_twins_have_their_own_rate(x64):
    """At the end of the warm-up, with a gradient of 1 and no momentum in the buffer."""
    recipe = lb.recipes.get("barlow-twins")
    params = {"kernel": jnp.ones((2, 2)), "bias": jnp.zeros(2)}
    optimizer = recipe.optimizer(params)
    state = at_step(optimizer, params, 6260)
    updates, _ = optimizer.update(params | {"bias": jnp.ones(2)}, state, params)
    np.testing.assert_allclose(updates["bias"], -0.0048 * 2048 / 256)
    np.testing.assert_allclose(updates["kernel"], -1.6 * 0.001, rtol=1e-5)


SMALL = {
    "conv/kernel": (3, 3, 2, 4),
    "dense/bias": (4,),
    "dense/kernel": (3, 4),
    "attention/bias": (2, 3),
    "norm/scale": (4,),
    "norm/bias": (4,),
}
FAIR = {"of_update": True, "scaled_momentum": False}
TXL = {"correction": "none", "bounds": (0.0, 10.0), "ratio_eps": 1e-6, "eps": 1e-6}
DEEPSPEED = {"eps": 1e-8, "correction": "step size", "ratio_bounds": (0.01, 10.0)}
DEIT = (reference.lamb, 1.0, "kernels", "kernels", {"eps": 1e-8})
TIMM = (reference.lamb, 1.0, "kernels", "kernels", {})
ALL_LARC = (reference.larc, None, "all", "all", {"trust": 0.001, "clip": False})
# By recipe: the formula, the clip of the whole gradient, what is decayed and adapted, the rest.
DIALECTS = {
    "simclr": (reference.lars, None, "kernels", "kernels", {"of_update": True}),
    "byol": (reference.lars, None, "kernels", "kernels", FAIR),
    "larc": ALL_LARC,
    "eva-clip": (reference.lamb, 5.0, "kernels", "all", DEEPSPEED),
    "deit": DEIT,
    "timm": TIMM,
    "perceiver-io": (reference.lamb, 10.0, "kernels", "all", {}),
    "albert": (reference.lamb, 1.0, "kernels", "kernels", {"correction": "none"}),
    "electra-base": (reference.lamb, None, "kernels", "kernels", {"betas": (0.878, 0.974)}),
    "bart": (reference.lamb, 0.1, "kernels", "kernels", {}),
    "transformer-xl": (reference.lamb, 0.25, "all", "all", TXL),
    "fastpitch": (reference.lamb, 1.0, "all", "all", {"betas": (0.9, 0.98), "eps": 1e-9}),
    "rnnt": (reference.lamb, 1.0, "all", "all", {"betas": (0.9, 0.9985), "eps": 1e-9}),
}
WEIGHT_DECAYS = {
    "simclr": 1e-4, "simclr-linear": 1e-4, "simclr-v2": 1e-4, "simclr-v2-fine-tune": 0.0,
    "byol": 1e-6, "detcon-b": 1.5e-6, "swav": 1e-6, "swav-small-batch": 1e-6,
    "deepcluster-v2": 1e-6, "barlow-twins": 1e-6, "barlow-twins-batch-sizes": 1e-6, "vicreg": 1e-6,
    "moco-v3": 1e-6, "vissl-simclr": 1e-6, "simsiam": 0.0, "mae": 0.0, "eva-clip-224": 0.0,
    "eva-clip-336": 0.0, "eva01-g14-plus": 0.05, "eva02-b16": 0.05, "eva02-l14": 0.05,
    "eva02-l14-336": 0.05, "eva02-e14": 0.05, "eva02-e14-plus": 0.05, "deit-iii": 0.05,
    "deit-iii-21k": 0.02, "deit-iii-21k-fine-tune": 0.02, "strikes-back-a1": 0.01,
    "strikes-back-a2": 0.02, "strikes-back-a3": 0.02, "metaformer": 0.05,
    "metaformer-fine-tune": 0.05, "deepmind": 0.1, "google": 0.01, "nvidia-phase1": None,
    "nvidia-phase2": None, "nvidia-base": 0.0, "nvidia-large": 0.0, "nvidia-large-multi-node": 0.0,
    "nvidia": 1e-6, "mlperf": 1e-3,
}  # fmt: skip


def dialect(name):
    model, algorithm, whose = name.split("/")
    if whose.startswith("simclr"):
        return DIALECTS["simclr"]
    if algorithm == "larc":
        return DIALECTS["larc"]
    if "deit" in whose:
        return DIALECTS["deit"]
    if algorithm == "lars":
        return DIALECTS["byol"]
    return DIALECTS.get(model, DIALECTS["timm"])


def weight_decay(name):
    of_bart_and_electra = {"bart": 0.1, "electra-base": 0.01}
    return of_bart_and_electra.get(name.split("/")[0], WEIGHT_DECAYS[name.split("/")[2]])


# Nothing of ScaledAdam is decayed or adapted.
FIRST = list({run.name: run for run in reversed(RUNS) if "scaled" not in run.name}.values())


def test_zipformer_clips_and_takes_no_mask():
    recipe = lb.recipes.get("zipformer", batch_size=4000, examples=10**7)
    assert "scaled_adam(schedule, b1=0.9, b2=0.98, eps=1e-08, clipping_scale=2.0)" in recipe.code()
    with pytest.raises(ValueError, match="mask must be None for 'zipformer"):
        recipe.optimizer(mask=lb.matching("kernel"))


@pytest.mark.parametrize("run", FIRST, ids=lambda run: run.name)
def test_weight_decay_is_that_of_the_source(run):
    assert lb.recipes.get(run.name, **run.asked).weight_decay == weight_decay(run.name)


@pytest.mark.slow
@pytest.mark.parametrize("run", FIRST, ids=lambda run: run.name)
def test_optimizer_is_that_of_the_source(run, x64):
    """The formula of the dialect with the numbers of the source, over four steps.

    The weight decay is a larger one, with which it can be seen where it goes.
    """
    family, bound, decayed, adapted, switches = dialect(run.name)
    random = np.random.default_rng(0)
    start = {name: random.normal(size=shape) + 0.5 for name, shape in SMALL.items()}
    gradients = {name: random.normal(size=(4, *shape)) for name, shape in SMALL.items()}
    recipe = lb.recipes.get(run.name, **run.asked | {"weight_decay": 0.1})
    own_start, own_gradients = jax.tree.map(jnp.asarray, (start, gradients))
    ours = trained(recipe.optimizer(own_start), own_start, own_gradients)
    if bound is not None:
        gradients = reference.clip_by_global_norm(gradients, bound)
    chosen = {"all": lambda name: True, "kernels": lambda name: "kernel" in name}
    rates = np.array([run.rate(t) for t in range(4)])
    theirs = reference.trajectory(
        family, start, gradients,
        lr=lambda name: rates * bias_rate(run, name),
        wd=lambda name: 0.1 * chosen[decayed](name),
        adapted=chosen[adapted],
        **switches,
    )  # fmt: skip
    for name in start:
        moved = theirs[name][-1] - start[name]
        assert np.abs(moved).max() > 0
        np.testing.assert_allclose(ours[name] - start[name], moved, rtol=2e-5, err_msg=name)


def bias_rate(run, name):
    """The rate of Barlow Twins' biases over that of its weights."""
    if "kernel" in name or "barlow" not in run.name:
        return 1.0
    recipe = lb.recipes.get(run.name, **run.asked)
    return run.asked.get("bias_learning_rate", 0.0384) / recipe.learning_rate


KINDS = {
    "resnet50": "resnet", "linear-probe": "probe", "eva-clip": "towers", "vit-s16": "vit",
    "vit-b16": "vit", "vit": "vit", "caformer": "vit", "perceiver-io": "vit", "rnnt": "recurrent",
    "fastpitch": "transformer",
}  # fmt: skip


ASKED = {run.name: run.asked for run in FIRST}
ASKED |= {name: {"batch_size": lb.recipes.batch_sizes(name)[-1]} for name in TEN}


@pytest.mark.slow
@pytest.mark.parametrize("name", ASKED)
def test_takes_a_step_on_a_network_of_its_kind(name):
    kind = KINDS.get(name.split("/")[0], "transformer")
    networks.takes_a_step(lb.recipes.get(name, **ASKED[name]), kind)


CODE = {
    "byol": {"epochs": 100}, "barlow-twins": {}, "swav": {"epochs": 100},
    "resnet50/sgd/linear": {"batch_size": 256}, "bert-large/lans/paper-phase1": {},
    "bert-large/lamb/nvidia-phase1": {}, "vit-s16/lamb/deit-iii": {}, "eva02-l14": {},
    "fastpitch": {"examples": 12500}, "nvidia-base": {},
    "metaformer-fine-tune": {"weight_decay": 0},
    "rnnt": {"batch_size": 512, "examples": 280_000, "epochs": 60},
}  # fmt: skip


@pytest.mark.parametrize("name", CODE)
def test_the_code_builds_the_same_optimizer(name):
    recipe = lb.recipes.get(name, **CODE[name])
    params = {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3), "scale": jnp.ones(3)}
    program = networks.built_by_code(recipe, params)
    for step in (0, 7, recipe.total_steps // 2):
        assert program["schedule"](step) == recipe.schedule()(step)
