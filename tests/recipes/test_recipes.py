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
from tests.helpers import drawn
from tests.recipes.networks import SMALL, assert_moves, trained
from tests.recipes.sources import IMAGES, RUNS


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


ADAPTED = {"adapted": kernels}
# For each recipe: the formula of its optimizer, the bound of the gradient's norm, the decay and
# other numbers, as published. Biases and scales are neither decayed nor adapted.
FORMULAS = {
    ("bert-large/lamb/mlperf", 256): (reference.lamb, 1.0, 0.01, ADAPTED),
    ("bert-large/lamb/paper", 32768): (reference.lamb, None, 0.01, ADAPTED),
    ("bert-large/lamb/nvidia-phase1", 65536): (reference.lamb, 1.0, 0.01, ADAPTED),
    ("bert-large/lamb/nvidia-phase2", 32768): (reference.lamb, 1.0, 0.01, ADAPTED),
    ("bert-large/lans/paper-phase1", 98304): (reference.lans, None, 0.01, {}),
    ("bert-large/lans/paper-phase2", 33792): (reference.lans, None, 0.01, {}),
    ("resnet50/lamb/you", 32768): (reference.lamb, 1.0, 1.5, ADAPTED | {"correction": "none"}),
    ("resnet50/lars/mlperf", 1632): (reference.lars, None, 5e-5, ADAPTED),
    ("resnet50/lars/square-root", 512): (
        reference.lars, None, 1e-4, ADAPTED | {"eps": 1e-5, "scaled_momentum": False}
    ),
    ("resnet50/sgd/linear", 8192): (sgd, None, 1e-4, {}),
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
    family, bound, decay, switches = FORMULAS[name, batch_size]
    asked = {"batch_size": batch_size}
    (rule,) = [run.rate for run in RUNS if (run.name, run.asked) == (name, asked)]
    assert_moves(
        lb.recipes.get(name, batch_size), family, bound, 2e-3,
        filter(kernels, SMALL) if family is reference.lans else SMALL,
        lr=[rule(t) for t in range(4)],
        wd=lambda name: decay * kernels(name),
        **switches,
    )  # fmt: skip


def test_lans_leaves_biases_unadapted(x64):
    """The formula above has no such switch: a bias at zero has nothing that it could adapt to."""
    params = {"kernel": jnp.full((3, 4), 2.0), "bias": jnp.full(4, 2.0)}
    gradients = jax.tree.map(lambda p: jnp.ones((2, *p.shape)), params)
    recipe = lb.recipes.get("bert-large/lans/paper-phase1")
    rate = float(recipe.schedule()(1))
    for mask in (~lb.matching("bias"), lb.at_least_ndim(2)):
        end = trained(recipe.optimizer(mask=mask), params, gradients)
        assert_allclose(end["bias"], 2.0 - rate, rtol=1e-6)
        assert np.all(np.abs(end["kernel"] - 2.0) > 1.5 * rate)


def test_decay_rates_of_a_row_reach_the_optimizer():
    params = drawn(SMALL)
    gradients = jax.tree.map(lambda p: jnp.stack([p, -p, jnp.cos(p)]), params)
    recipe = lb.recipes.get("bert-large/lamb/mlperf", 8192)
    mask = ~lb.matching("bias", "scale")
    same = lb.lamb(
        recipe.schedule(), 0.88, 0.88, 1e-6, 0.0, 0.0166629, mask, trust_ratio_mask=mask,
        max_grad_norm=1.0,
    )  # fmt: skip
    ours = trained(recipe.optimizer(), params, gradients)
    jax.tree.map(assert_array_equal, ours, trained(same, params, gradients))


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
    settings = ("momentum 0.94", "warmup_steps 626", "total_steps 2267")
    for said in (recipe.source, recipe.note, recipe.origin, *settings):
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
