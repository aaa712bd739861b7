"""The scaling laws of Marin and nanochat, written down from their code, by calls of the library.

Marin: `MoeMuonHHeuristic` of experiments/june_tpu_67b_a2b/moe/heuristic_muonh.py,
marin-community/marin@6019f395. nanochat: scripts/base_train.py:260-330, karpathy/nanochat@92d63d4e.
"""

import math

import pytest

import optax_largebatch as lb

THREE_DIGITS = 5e-4
WIDTH = 2560
REFERENCE = (131_072, 2**14 * 131_072)
"""The tokens in a batch and in the run from which Marin's laws are followed here."""


def marin(batch, tokens):
    """The settings of a run, from its tokens in a batch and in all."""
    adam = 0.06602 * tokens**-0.395 * WIDTH**-0.150 * math.sqrt(batch)
    return {
        "muonh": 13 / 3 * adam,
        "adam": adam,
        "b2": max(0.95, min(0.9999, 0.999 ** (batch / 131_072))),
        "eps": 9.676e-18 * math.sqrt(tokens / batch),
    }


def follow(batch, tokens, group="muonh", start=REFERENCE):
    """What the rule makes of the settings at the reference."""
    own = marin(*start)
    settings = lb.Hyperparameters(
        learning_rate=own[group],
        momentum=0.95,
        b1=0.9062,
        b2=own["b2"],
        eps=own["eps"],
        total_steps=round(start[1] / start[0]),
    )
    return lb.scale_hyperparameters(
        settings,
        from_batch=start[0],
        to_batch=batch,
        rule="hyperball",
        run_length=tokens / start[1],
        length_power=-0.395,
    ).settings


@pytest.mark.parametrize("batch", [2**12, 2**17, 2**20, 2**22, 2**26])
@pytest.mark.parametrize("tokens", [5e8, 2e10, 1e13])
def test_laws_of_marin(batch, tokens):
    expected = marin(batch, tokens)
    for group in ("muonh", "adam"):
        new = follow(batch, tokens, group)
        assert new.learning_rate == pytest.approx(expected[group], rel=THREE_DIGITS)
        assert new.b2 == pytest.approx(expected["b2"], abs=1e-6)
        assert new.eps == pytest.approx(expected["eps"], rel=THREE_DIGITS)
        assert (new.b1, new.momentum) == (0.9062, 0.95)


def test_recipe_of_marin():
    """The published numbers of the run with 67 billion parameters, from a small batch."""
    recipe = lb.recipes.get("marin-67b/muonh/marin-phase1")
    batch = recipe.batch_size * recipe.sequence_length
    tokens = batch * recipe.total_steps
    new = follow(batch, tokens)
    assert new.learning_rate == pytest.approx(recipe.learning_rate, rel=THREE_DIGITS)
    assert new.b2 == recipe.b2 == 0.95
    assert new.eps == pytest.approx(recipe.eps, rel=THREE_DIGITS)
    assert new.total_steps == recipe.total_steps
    rest = follow(batch, tokens, "adam").learning_rate
    assert rest == pytest.approx(recipe.rest.learning_rate, rel=THREE_DIGITS)


def test_twice_the_batch_of_marin():
    """Phase 2 has twice the batch; the peak that its rate belongs to is 0.005281."""
    recipe = lb.recipes.get("marin-67b/muonh/marin-phase1")
    settings = lb.Hyperparameters(
        learning_rate=recipe.learning_rate, b2=recipe.b2, eps=recipe.eps, total_steps=300_000
    )
    new = lb.scale_hyperparameters(
        settings, from_batch=4096, to_batch=8192, rule="hyperball"
    ).settings
    assert new.learning_rate == pytest.approx(0.005281, rel=THREE_DIGITS)
    assert new.eps == pytest.approx(3.75e-15, rel=2e-3)  # as in a comment of issue #6044
    assert (new.b2, new.total_steps) == (0.95, 150_000)


PARAMETERS = {depth: depth * 12 * (64 * depth) ** 2 + 64 * depth * 32_768 for depth in (12, 24)}
"""nanochat's matrices and last layer, whose tokens are counted for the length of a run."""


def test_recipe_of_nanochat():
    """24 layers, from the settings that were tuned with 12."""
    recipe = lb.recipes.get("nanochat-d24/muon/speedrun")
    old_batch, old_tokens = 2**19, 8 * PARAMETERS[12]
    run_length = PARAMETERS[24] / PARAMETERS[12]
    assert run_length == pytest.approx(6.63, rel=THREE_DIGITS)

    law = 2**19 * run_length**0.383
    assert lb.scale_batch_size(old_batch, run_length=run_length) == pytest.approx(law, rel=1e-6)
    batch = 2 ** round(math.log2(lb.scale_batch_size(old_batch, run_length=run_length)))
    assert batch == recipe.batch_size * recipe.sequence_length

    tuned = lb.Hyperparameters(
        learning_rate=0.02, weight_decay=0.28, total_steps=round(old_tokens / old_batch)
    )
    new = lb.scale_hyperparameters(
        tuned, from_batch=old_batch, to_batch=batch, rule="muon", run_length=run_length
    ).settings
    assert new.learning_rate == pytest.approx(recipe.learning_rate, rel=THREE_DIGITS)
    assert new.weight_decay == pytest.approx(recipe.weight_decay, rel=THREE_DIGITS)
    assert new.total_steps == pytest.approx(recipe.total_steps, rel=THREE_DIGITS)


@pytest.mark.parametrize("batch", [2**18, 2**19, 2**20, 2**21])
@pytest.mark.parametrize("run_length", [0.1, 1.0, 6.63, 20.0])
def test_laws_of_nanochat(batch, run_length):
    tuned = lb.Hyperparameters(learning_rate=0.02, weight_decay=0.28)
    new = lb.scale_hyperparameters(
        tuned, from_batch=2**19, to_batch=batch, rule="muon", run_length=run_length
    ).settings
    ratio = batch / 2**19
    assert new.learning_rate == pytest.approx(0.02 * ratio**0.5, rel=THREE_DIGITS)
    assert new.weight_decay == pytest.approx(0.28 * math.sqrt(ratio) / run_length, rel=THREE_DIGITS)
