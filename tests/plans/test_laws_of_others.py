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


def follow(batch, tokens, group="muonh"):
    """What the law makes of the settings at the reference: a plan that counts tokens."""
    start = marin(*REFERENCE)
    run = lb.TunedRun(
        "muonh", batch_size=REFERENCE[0], total=REFERENCE[1], learning_rate=start[group],
        momentum=0.95, b1=0.9062, b2=start["b2"], eps=start["eps"],
    )  # fmt: skip
    return lb.batch_plan(batch, total=round(tokens), run=run, law="marin")


@pytest.mark.parametrize("batch", [2**12, 2**17, 2**20, 2**22, 2**26])
@pytest.mark.parametrize("tokens", [5e8, 2e10, 1e12])
def test_laws_of_marin(batch, tokens):
    expected = marin(batch, tokens)
    for group in ("muonh", "adam"):
        plan = follow(batch, tokens, group)
        assert float(plan.learning_rate(0)) == pytest.approx(expected[group], rel=THREE_DIGITS)
        assert float(plan.b2(0)) == pytest.approx(expected["b2"], abs=1e-6)
        assert plan.eps == pytest.approx(expected["eps"], rel=THREE_DIGITS)
        assert (float(plan.b1(0)), float(plan.momentum(0))) == pytest.approx((0.9062, 0.95))


def test_recipe_of_marin():
    """The published numbers of the run with 67 billion parameters, from a small batch."""
    recipe = lb.recipes.get("marin-67b/muonh/marin-phase1")
    batch = recipe.batch_size * recipe.sequence_length
    tokens = batch * recipe.total_steps
    plan, rest = (follow(batch, tokens, group) for group in ("muonh", "adam"))
    assert float(plan.learning_rate(0)) == pytest.approx(recipe.learning_rate, rel=THREE_DIGITS)
    assert float(plan.b2(0)) == pytest.approx(recipe.b2)
    assert plan.eps == pytest.approx(recipe.eps, rel=THREE_DIGITS)
    assert plan.total_steps == recipe.total_steps
    assert float(rest.learning_rate(0)) == pytest.approx(
        recipe.rest.learning_rate, rel=THREE_DIGITS
    )


def test_twice_the_batch_of_marin():
    """Phase 2 has twice the batch; the peak that its rate belongs to is 0.005281."""
    recipe = lb.recipes.get("marin-67b/muonh/marin-phase1")
    examples = 4096 * 300_000
    run = lb.TunedRun(
        "muonh", batch_size=4096, total=examples, learning_rate=recipe.learning_rate,
        b2=recipe.b2, eps=recipe.eps,
    )  # fmt: skip
    plan = lb.batch_plan(8192, total=examples, run=run, law="marin")
    assert float(plan.learning_rate(0)) == pytest.approx(0.005281, rel=THREE_DIGITS)
    assert plan.eps == pytest.approx(3.75e-15, rel=2e-3)  # as in a comment of issue #6044
    assert float(plan.b2(0)) == pytest.approx(0.95)
    assert plan.total_steps == 150_000


PARAMETERS = {depth: depth * 12 * (64 * depth) ** 2 + 64 * depth * 32_768 for depth in (12, 24)}
"""nanochat's matrices and last layer, whose tokens are counted for the length of a run."""


def test_recipe_of_nanochat():
    """24 layers, from the settings that were tuned with 12."""
    recipe = lb.recipes.get("nanochat-d24/muon/speedrun")
    run_length = PARAMETERS[24] / PARAMETERS[12]
    assert run_length == pytest.approx(6.63, rel=THREE_DIGITS)
    law = 2**19 * run_length**0.383
    assert lb.scale_batch_size(2**19, run_length=run_length) == pytest.approx(law, rel=1e-6)
    batch = 2 ** round(math.log2(lb.scale_batch_size(2**19, run_length=run_length)))
    assert batch == recipe.batch_size * recipe.sequence_length

    total = 8 * PARAMETERS[12]
    run = lb.TunedRun("muon", batch_size=2**19, total=total, learning_rate=0.02, weight_decay=0.28)
    plan = lb.batch_plan(batch, total=round(total * run_length), run=run, law="sqrt")
    assert float(plan.learning_rate(0)) == pytest.approx(recipe.learning_rate, rel=THREE_DIGITS)
    assert float(plan.weight_decay(0)) == pytest.approx(recipe.weight_decay, rel=THREE_DIGITS)
    assert plan.total_steps == pytest.approx(recipe.total_steps, rel=THREE_DIGITS)
