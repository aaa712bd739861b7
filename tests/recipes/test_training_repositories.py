"""The recipes of training repositories: steps and exclusions, written down once more."""

import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose
import pytest

import optax_largebatch as lb
from tests import reference
from tests.recipes.networks import VISION, assert_moves, at_step, built_by_code, takes_a_step
from tests.recipes.sources import RUNS
from tests.recipes.test_recipes import TEN

BY_NAME = {run.name: run for run in reversed(RUNS) if run.name not in TEN}
# Nothing of ScaledAdam is decayed or adapted.
FIRST = [run for name, run in BY_NAME.items() if "scaled" not in name]


def test_biases_of_barlow_twins_have_their_own_rate(x64):
    """At the end of the warm-up, with a gradient of 1 and no momentum in the buffer."""
    recipe = lb.recipes.get("barlow-twins")
    params = {"kernel": jnp.ones((2, 2)), "bias": jnp.zeros(2)}
    optimizer = recipe.optimizer(params)
    state = at_step(optimizer, params, 6260)
    updates, _ = optimizer.update(params | {"bias": jnp.ones(2)}, state, params)
    assert_allclose(updates["bias"], -0.0048 * 2048 / 256)
    assert_allclose(updates["kernel"], -1.6 * 0.001, rtol=1e-5)


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


def test_zipformer_clips_and_takes_no_mask():
    recipe = lb.recipes.get("zipformer", batch_size=4000, examples=10**7)
    assert "scaled_adam(schedule, b1=0.9, b2=0.98, eps=1e-08, clipping_scale=2.0)" in recipe.code()
    with pytest.raises(ValueError, match="mask must be None for 'zipformer"):
        recipe.optimizer(mask=lb.matching("kernel"))


@pytest.mark.slow
@pytest.mark.parametrize("run", FIRST, ids=lambda run: run.name)
def test_optimizer_is_that_of_the_source(run, x64):
    """The formula of the dialect with the numbers of the source, over four steps.

    The weight decay is a larger one, with which it can be seen where it goes.
    """
    family, bound, decayed, adapted, switches = dialect(run.name)
    chosen = {"all": lambda name: True, "kernels": lambda name: "kernel" in name}
    rates = np.array([run.rate(t) for t in range(4)])
    assert_moves(
        lb.recipes.get(run.name, **run.asked | {"weight_decay": 0.1}), family, bound, 2e-5,
        lr=lambda name: rates * bias_rate(run, name),
        wd=lambda name: 0.1 * chosen[decayed](name),
        adapted=chosen[adapted],
        **switches,
    )  # fmt: skip


def bias_rate(run, name):
    """The rate of Barlow Twins' biases over that of its weights."""
    if "kernel" in name or "barlow" not in run.name:
        return 1.0
    recipe = lb.recipes.get(run.name, **run.asked)
    return run.asked.get("bias_learning_rate", 0.0384) / recipe.learning_rate


ASKED = {run.name: run.asked for run in FIRST}
ASKED |= {name: {"batch_size": lb.recipes.batch_sizes(name)[-1]} for name in TEN}


@pytest.mark.slow
@pytest.mark.parametrize("name", ASKED)
def test_takes_a_step(name):
    takes_a_step(lb.recipes.get(name, **ASKED[name]), VISION)


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
    program = built_by_code(recipe, params)
    for step in (0, 7, recipe.total_steps // 2):
        assert program["schedule"](step) == recipe.schedule()(step)
