"""The search of a rate, and the exponent of the critical batch size."""

import math

import pytest
from scipy.optimize import brentq

from benchmarks import critical_batch_of_tokens
from benchmarks.critical_batch_of_tokens import BATCHES, BUDGETS, SEEDS, exponent_by_seed, searched


@pytest.mark.parametrize("begin", [0.01, 0.2, 5.0])
def test_the_search_ends_at_the_lowest_point(begin):
    tried = []

    def loss(rate):
        tried.append(rate)
        return math.log(rate / 0.2) ** 2

    assert searched(begin, loss) == pytest.approx(0.2, rel=1e-3)
    assert len(tried) == len(set(tried))


@pytest.mark.parametrize("power", [0.3, 0.8])
def test_an_exponent_that_was_put_in_comes_out(power):
    def loss(batch, examples, seed):
        def excess(least):
            return least * (1 + batch / (300 * (least / 2**14) ** power)) - examples

        return 3 - 0.1 * math.log(brentq(excess, 1e-6, examples)) + 0.001 * seed

    losses = {
        batch: {own: {seed: loss(batch, own, seed) for seed in SEEDS} for own in BUDGETS}
        for batch in BATCHES
    }
    assert exponent_by_seed(losses).mean == pytest.approx(power, abs=0.05)
    with pytest.raises(ValueError, match="no two budgets of seed 1 have the loss"):
        critical_batch_of_tokens.examples_to(9.0, losses[16], 1)
