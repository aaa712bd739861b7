"""The recipes of Muon and MuonH against their sources, whose formulas are written down here.

A source's schedule is compared at every step, and its optimizer over four steps on small matrices.
"""

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import pytest

import optax_largebatch as lb
from tests.conftest import slow_but
from tests.helpers import drawn
from tests.recipes.networks import TRANSFORMER, built_by_code, takes_a_step, trained
from tests.reference import clip_by_global_norm

FILE = json.loads(Path(__file__).with_name("muon_sources.json").read_text())
SOURCES = FILE["recipes"]
RECIPES = {name: lb.recipes.get(name, **source["asked"]) for name, source in SOURCES.items()}
QUICK = ("marin-67b/muonh/marin-phase1", "moonlight-16b/muon/moonshot-pretraining")
by_name = pytest.mark.parametrize("name", RECIPES)


def recipe_of(part):
    (found,) = [recipe for name, recipe in RECIPES.items() if part in name]
    return found


def track3(step, cooldown):
    """`set_hparams` of train_gpt_simple.py: 1, then linear to 0 over a last part of the run."""
    progress = step / 3250
    return 1.0 if progress < 1 - cooldown else (1 - progress) / cooldown


def nanochat(it):
    """`get_lr_multiplier` of base_train.py, 5568 steps."""
    warmdown = round(0.65 * 5568)
    if it < 40:
        return (it + 1) / 40
    if it <= 5568 - warmdown:
        return 1.0
    progress = (5568 - it) / warmdown
    return progress + (1 - progress) * 0.05


def momentum_of_nanochat(it):
    """`get_muon_momentum` of base_train.py, 5568 steps; of its peak."""
    start = 5568 - round(0.65 * 5568)
    if it < 400:
        return (0.85 + it / 400 * 0.12) / 0.97
    return 1 - 0.07 / 0.97 * max(it - start, 0) / (5568 - start)


def half_cosine(it):
    """That of nanochat's decay, 5568 steps."""
    return 0.5 * (1 + math.cos(math.pi * it / 5568))


def levanter(step, total):
    """`lr_scheduler` of Levanter: linear, from 0 in int(0.01 N) steps, and to 0.05 at the end."""
    warmup = int(0.01 * total)
    if step < warmup:
        return step / warmup
    return 1 + (0.05 - 1) * (step - warmup) / (total - warmup)


def resumed(step):
    """`lr_scheduler` of launch_2x_bs.py, in units of 0.005078; its steps are counted from 15000."""
    at, start, top, end = step + 15_000, 0.003590, 0.005078, 0.005281 * 0.05
    if at < 15_100:
        return (start + (top - start) * (at - 15_000) / 100) / top
    return (top + (end - top) * (at - 15_100) / (157_500 - 15_100)) / top


def moonlight(step):
    """Section 3.3, stages 1 and 2, with the tokens of a batch of 2048: 2000 steps are 33.6e9."""
    total = 5.2e12 / (2048 * 8192)
    if step < 2000:
        return step / 2000
    part = (step - 2000) / (total - 2000)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(part, 1)))


def cooldown(step):
    """Stage 3, in units of its peak."""
    if step < 100:
        return 0.42 + 0.58 * step / 100
    return 1 - (step - 100) / (5e11 / (4096 * 8192) - 100)


def megatron(step):
    """`get_lr` of optimizer_param_scheduler.py without warm-up: min_lr 0, coefficient 1 - ratio."""
    return 1.0 - step / 10_000


RULES = {
    rule.__name__: rule
    for rule in (
        track3, nanochat, momentum_of_nanochat, half_cosine, levanter, resumed, moonlight, cooldown,
        megatron,
    )
}  # fmt: skip


def rate_of(name, key):
    """A schedule of a source, by its name in the printed program."""
    own = SOURCES[name]["schedules"][key]
    return lambda step: own["peak"] * RULES[own["rule"]](step, **own["settings"])


def test_every_recipe_is_here():
    assert lb.recipes.names("muon") == sorted(RECIPES)
    assert set(lb.recipes.names("muonh")) == {name for name in RECIPES if "/muonh/" in name}


@by_name
def test_schedules_are_those_of_the_source(name, x64):
    recipe, program = RECIPES[name], {}
    exec(recipe.code(), program)
    kinds = ("schedule", "_decay", "momentum")
    schedules = {key: own for key, own in program.items() if key.endswith(kinds)}
    assert set(schedules) == set(SOURCES[name]["schedules"])
    steps = jnp.arange(recipe.total_steps)
    for key, own in SOURCES[name]["schedules"].items():
        # Moonlight's steps are a rounded quotient of tokens; 0.85 of track 3's is half a step more.
        close = {"rtol": own["error"], "atol": own["error"] * own["peak"], "err_msg": key}
        expected = [*map(rate_of(name, key), range(recipe.total_steps))]
        assert_allclose(jax.vmap(schedules[key])(steps), expected, **close)
    assert_array_equal(*(jax.vmap(x)(steps) for x in (recipe.schedule(), schedules["schedule"])))


def test_lengths_are_the_tokens_of_the_sources():
    tokens = {
        name: recipe.batch_size * recipe.sequence_length * recipe.total_steps
        for name, recipe in RECIPES.items()
        if recipe.sequence_length
    }
    for name in ("muon", "muonh"):
        assert tokens[f"gpt2-124m/{name}/track-3"] == 8 * 64 * 1024 * 3250
    assert tokens["nanochat-d24/muon/speedrun"] == 5_838_484_992 // 2**20 * 2**20
    for name, expected in (("535b", 18e12), ("pretraining", 5.2e12), ("cooldown", 5e11)):
        (found,) = [own for key, own in tokens.items() if name in key]
        assert found == pytest.approx(expected, rel=1e-3)
    assert "524288 tokens" in recipe_of("muon/track-3").summary()
    planned, phase2 = tokens["marin-67b/muonh/marin-phase1"], tokens["marin-67b/muonh/marin-phase2"]
    assert planned == phase2 + planned // 20 == pytest.approx(10.07e12, rel=1e-3)


SMALL = {
    "embed": (7, 4), "layer/kernel": (4, 6), "layer/bias": (6,), "out/kernel": (6, 4),
    "norm/scale": (4,), "head": (4, 7),
}  # fmt: skip


def newton_schulz(g, coefficients, eps, *, floor=False):
    norm = np.linalg.norm(g)
    x = g / (max(norm, eps) if floor else norm + eps)
    x = x.T if x.shape[0] > x.shape[1] else x
    for a, b, c in coefficients:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if x.shape == g.shape else x.T


def jordan(shape):  # rows are inputs here, and outputs in PyTorch
    return math.sqrt(max(1, shape[1] / shape[0]))


def on_sphere(w, u, rate):
    moved = w - rate * u * np.linalg.norm(w) / np.linalg.norm(u)
    return moved / np.linalg.norm(moved) * np.linalg.norm(w)


def trajectory(source, start, gradients, rate):
    """Four steps of the source; `rate` takes a kind of parameters or another name, and a step."""
    end = {}
    b1, b2, eps = source.adam
    for name, w in start.items():
        kind = name if name in ("embed", "head") else "matrix" if "kernel" in name else "rest"
        m, v = np.zeros_like(w), np.zeros_like(w)
        for t, g in enumerate(gradients[name]):
            eta = rate(kind, t)
            if kind == "matrix":
                beta = source.momentum or rate("momentum", t)
                weight = 1.0 if source.is_sum else 1 - beta
                m = beta * m + weight * g
                d = beta * m + weight * g if source.nesterov else m
                u = newton_schulz(d, source.coefficients, source.eps, floor=source.floor)
                rms = source.consistent_rms
                u = u * (rms * math.sqrt(max(w.shape)) if rms else jordan(w.shape))
                decay = source.matrix_decay
                decay = rate("weight_decay", t) if decay is None else decay
                w = on_sphere(w, u, eta) if source.sphere else (1 - eta * decay) * w - eta * u
                continue
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
            u = m / (1 - b1 ** (t + 1)) / (np.sqrt(v / (1 - b2 ** (t + 1))) + eps)
            if kind == "head" and source.head_on_sphere:
                w = on_sphere(w, u, eta)
            else:
                w = (1 - eta * source.decays.get(kind, 0.0)) * w - eta * u
        end[name] = w
    return end


@by_name
def test_optimizer_is_that_of_the_source(name, x64):
    """In float64, while the sources run the iterations in bfloat16."""
    source = SimpleNamespace(**SOURCES[name]["optimizer"])
    source.coefficients = FILE["coefficients"][source.coefficients]
    random = np.random.default_rng(0)
    start = {key: random.normal(size=shape) for key, shape in SMALL.items()}
    gradients = {key: random.normal(size=(4, *shape)) for key, shape in SMALL.items()}
    recipe = dataclasses.replace(RECIPES[name], ns_dtype=None)
    own_start, own_gradients = jax.tree.map(jnp.asarray, (start, gradients))
    ours = trained(recipe.optimizer(own_start), own_start, own_gradients)
    gradients = clip_by_global_norm(gradients, source.bound or np.inf)
    rules = SOURCES[name]["schedules"]

    def rate(kind, t):
        of_matrices = kind == "matrix" or (kind == "head" and source.head_on_sphere)
        keys = {"embed": "embeddings_schedule", "head": "head_schedule", "rest": "rest_schedule"}
        key = "schedule" if of_matrices else keys.get(kind, kind)
        known = [key for key in (key, "rest_schedule", "schedule") if key in rules]
        return rate_of(name, known[0])(t)

    theirs = trajectory(source, start, gradients, rate)
    for key, w in start.items():
        moved = theirs[key] - w
        assert np.abs(moved).max() > 0
        error = np.abs(np.asarray(ours[key]) - w - moved).max()
        assert error <= 1e-5 * np.abs(moved).max(), (key, error)


AXES = {
    "(query|key|value)/kernel": (0, (1, 2)),
    "(query|key|value)/bias": None,
    "out/kernel": ((0, 1), 2),
}


@pytest.mark.parametrize("name", slow_but(QUICK, RECIPES))
def test_takes_a_step_on_a_transformer(name):
    """As published, in bfloat16."""
    rules = {"embeddings": lb.matching("^embedding"), "head": lb.matching("^head/")}
    takes_a_step(RECIPES[name], TRANSFORMER, **rules, matrix_axes=AXES)


@by_name
def test_the_code_builds_the_same_optimizer(name):
    built_by_code(RECIPES[name], drawn(SMALL))


def explained(name, params, **rules):
    return lb.explain(recipe_of(name).optimizer(**rules), params).parameters


def decayed(parameters):
    return {one.name for one in parameters if one.decayed}


def on_spheres(parameters):
    return {one.name for one in parameters if one.length == "sphere"}


def test_explains_what_is_decayed_and_what_keeps_its_norm():
    params, matrices = drawn(SMALL), {"layer/kernel", "out/kernel"}
    everything = set(SMALL)
    found = explained("muon/track-3", params)
    assert decayed(found) == everything
    assert not on_spheres(found)
    rates = {one.name: one.rate for one in found}
    assert rates["head"] < min(rates["embed"], rates["layer/kernel"])
    found = explained("muonh/track-3", params)
    assert decayed(found) == everything - matrices
    assert on_spheres(found) == matrices
    found = explained("marin-535b", params, head=lb.matching("head$"))
    assert not decayed(found)
    assert on_spheres(found) == {*matrices, "head"}
    assert decayed(explained("megatron", params)) == {*matrices, "embed", "head"}


def test_embeddings_and_head_go_by_the_names_that_are_given():
    params = {"wte": jnp.ones((7, 4)), "block": 2 * jnp.eye(4), "lm": jnp.ones((4, 7))}
    recipe = recipe_of("muonh/track-3")
    for build in (recipe.optimizer, recipe.optimizer().init):
        with pytest.raises(ValueError, match="pattern 'embed' matches no parameter"):
            build(params)
    ends = {"embeddings": lb.matching("wte"), "head": lb.matching("lm")}
    optimizer = recipe.optimizer(params, **ends)
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    assert_allclose(updates["wte"], -0.91 * 1.001, rtol=1e-5)
    assert_allclose(updates["lm"], -0.0064 * 1.001, rtol=1e-5)
    # Layers in a stack keep their own norms.
    stack = {"wte": params["wte"], "lm": params["lm"], "layers": jnp.stack([jnp.eye(4)] * 3)}
    optimizer = recipe.optimizer(stack, **ends, stacked=lb.stacked_layers({"layers": 0}))
    assert [one.blocks for one in lb.explain(optimizer, stack).parameters] == [3, 1, 1]


@by_name
def test_a_head_that_is_tied_has_the_settings_of_embeddings(name):
    params = {"embed": jnp.ones((7, 4)), "block": 2 * jnp.eye(4), "scale": jnp.ones(4)}
    recipe, tied = RECIPES[name], lb.matching("embed")
    optimizer = recipe.optimizer(params, embeddings=tied, head=tied)
    _, state = optimizer.update(params, optimizer.init(params), params)
    # A warm-up begins with a rate of 0.
    updates, _ = optimizer.update(params, state, params)
    own = recipe.embeddings or recipe.rest
    share = (own.learning_rate or recipe.learning_rate) / recipe.learning_rate
    expected = -recipe.schedule()(1) * share * (1 + own.weight_decay)
    assert_allclose(updates["embed"], jnp.full((7, 4), expected), rtol=1e-3)


NO_MUON = "must be None for .*which is no recipe of Muon"


@pytest.mark.parametrize(
    ("name", "given", "error", "says"),
    [
        (
            "gpt2-124m/muon/track-3",
            {"mask": lb.matching("w")},
            ValueError,
            "mask must be None for 'gpt2",
        ),
        ("marin-535b", {"head": "head"}, TypeError, r"head must be a rule, such as matching\('emb"),
        ("marin-535b", {"embeddings": ["embed"]}, TypeError, "embeddings must be a rule"),
        ("barlow-twins", {"embeddings": lb.matching("e")}, ValueError, NO_MUON),
        ("barlow-twins", {"head": lb.matching("h")}, ValueError, NO_MUON),
        ("barlow-twins", {"matrix_axes": AXES}, ValueError, "matrix_axes must be None"),
    ],
)
def test_wrong_masks(name, given, error, says):
    with pytest.raises(error, match=says):
        lb.recipes.get(name).optimizer(**given)


@pytest.mark.parametrize("part", ["marin-535b", "zipformer"])
def test_some_have_no_weight_decay(part):
    with pytest.raises(ValueError, match=rf"weight_decay must be None for '{part}.* has none"):
        lb.recipes.get(part, batch_size=11264, weight_decay=0.1)


def test_another_rate_or_length_changes_the_others_too():
    recipe = lb.recipes.get("gpt2-124m/muonh/track-3", learning_rate=0.009, total_steps=6500)
    assert recipe.embeddings.learning_rate == pytest.approx(0.455)
    assert recipe.rest.learning_rate == pytest.approx(0.00975)
    assert (recipe.hold_steps, recipe.others_hold_steps) == (0, 975)
    assert recipe.result is None
    speedrun = lb.recipes.get("speedrun", total_steps=1000)
    assert speedrun.hold_steps == 1000 - 650 - 39
    assert float(speedrun.schedule()(1000)) == pytest.approx(0.05 * speedrun.learning_rate)
    megatron = lb.recipes.get("nvidia-defaults", 8, learning_rate=1.0, total_steps=5)
    assert megatron.rest.learning_rate is None
    assert megatron.origin == "as published, for any batch size"


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("marin-535b", ("algorithm muonh", "46137344 tokens", "learning_rate 0.003291",
         "momentum 0.95", "rest (learning_rate 0.000759,", "head_on_sphere", "warmup_steps 3901")),
        ("muon/track-3", ("embeddings (learning_rate 0.7, ", "head (learning_rate 0.004, ",
         "hold_steps 975")),
        ("cool", ("rest (learning_rate that of the matrices, weight_decay 0.1)",)),
        ("megatron", ("max_grad_norm 1",)),
    ],
)  # fmt: skip
def test_summaries_have_the_settings(part, expected):
    said = recipe_of(part).summary()
    assert all(one in said for one in expected)
