"""The recipes of BERT and ResNet-50 against what was published, written down here once more."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import pytest

import optax_largebatch as lb
from tests import reference
from tests.recipes.networks import flat, trained
from tests.recipes.sources import IMAGES, RUNS


def small_model(name):
    """Parameters of that kind of network, with the names that Flax gives them."""
    shapes = {"dense": {"kernel": (3, 4), "bias": (4,)}, "norm": {"scale": (4,), "bias": (4,)}}
    if name.startswith("resnet50"):
        shapes["conv"] = {"kernel": (3, 3, 2, 4)}
    leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda node: isinstance(node, tuple))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    arrays = [jax.random.normal(*pair) + 0.5 for pair in zip(keys, leaves, strict=True)]
    return structure.unflatten(arrays)


@pytest.mark.parametrize("run", RUNS, ids=repr)
def test_schedule_and_numbers_are_those_of_the_source(run, x64):
    recipe = lb.recipes.get(run.name, **run.asked)
    ours = jax.vmap(recipe.schedule())(jnp.asarray(run.steps))
    expected = [run.rate(t) for t in run.steps]
    assert_allclose(ours, expected, rtol=1e-9, atol=1e-12 * max(expected))
    assert recipe.total_steps == run.steps[-1]
    assert run.numbers == {name: getattr(recipe, name) for name in run.numbers}


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


TEN = sorted({name for name, _ in FORMULAS})


def test_every_run_is_here():
    """Those of Muon and the ramps have files of their own."""
    elsewhere = {*lb.recipes.names("muon"), *lb.recipes.names("ramps")}
    assert {run.name for run in RUNS} == set(lb.recipes.names()) - elsewhere
    sizes = {(run.name, *run.asked.values()) for run in RUNS if run.name in TEN}
    assert sizes == {(name, n) for name in TEN for n in lb.recipes.batch_sizes(name)}
    assert all(len(run.steps) >= 5 for run in RUNS)


@pytest.mark.parametrize(("name", "batch_size"), FORMULAS)
def test_optimizer_is_the_published_one(name, batch_size, x64):
    family, bound, switches = FORMULAS[name, batch_size]
    switches = dict(switches)
    decay = switches.pop("wd")
    asked = {"batch_size": batch_size}
    (rule,) = [run.rate for run in RUNS if (run.name, run.asked) == (name, asked)]
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
        assert_allclose(ours[leaf] - start[leaf], moved, rtol=2e-3)


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
        assert_allclose(end["dense"]["bias"], 2.0 - rate, rtol=1e-6)
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
    jax.tree.map(assert_array_equal, ours, trained(same, params, gradients))


@pytest.mark.parametrize("name", TEN)
def test_trains_at_every_published_size(name):
    """Each builds a schedule that starts, peaks and ends within its bounds."""
    for batch_size in lb.recipes.batch_sizes(name):
        recipe = lb.recipes.get(name, batch_size)
        schedule = recipe.schedule()
        rates = [float(schedule(round(part * recipe.total_steps / 40))) for part in range(41)]
        assert min(rates) >= 0
        assert 0.6 * recipe.learning_rate < max(rates) <= recipe.learning_rate * (1 + 1e-6)
        assert rates[-1] <= 0.002 * recipe.learning_rate
        assert recipe.origin in recipe.summary()


@pytest.mark.parametrize("batch_size", [255, 10_000, 16385])
def test_refuses_other_sizes(batch_size):
    with pytest.raises(ValueError, match=r"batch_size must be one of the batch sizes") as caught:
        lb.recipes.get("bert-large/lamb/mlperf", batch_size)
    nearest = {255: 256, 10_000: 8704, 16385: 16384}[batch_size]
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
