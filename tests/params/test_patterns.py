"""Short patterns that select some names and no others."""

import re

import hypothesis
from hypothesis import strategies
import pytest

from optax_largebatch.params.patterns import patterns_of

LAYERS = [f"h/{n}/{name}/kernel" for n in range(12) for name in ("query", "key", "up")]


@pytest.mark.parametrize(
    ("names", "chosen", "expected"),
    [
        (LAYERS, {n for n in range(36) if n % 3 < 2}, ["(^|/)(query|key)/kernel$"]),
        (["a/w", "b/w", "c"], {0, 1}, ["(^|/)w$"]),
        (["conv_1/w", "conv_in/w"], {0}, [r"(^|/)conv_\d+/w$"]),
        (["conv_1/w", "conv_2/w"], {0}, ["^conv_1/w$"]),
        (["0", "1", "10"], {1}, ["^1$"]),
        (["x+y/w", "xy/w"], {0}, [r"(^|/)x\+y/w$"]),
    ],
)
def test_short(names, chosen, expected):
    assert patterns_of(names, chosen) == expected


KEYS = strategies.sampled_from(["a", "b1", "b2", "kernel", "w", "0", "1", "(x)"])
NAMES = strategies.lists(strategies.lists(KEYS, min_size=1, max_size=3).map("/".join), unique=True)


@hypothesis.settings(deadline=None)
@hypothesis.given(NAMES, strategies.data())
def test_all_that_are_chosen_and_no_others(names, data):
    chosen = (
        data.draw(strategies.sets(strategies.sampled_from(range(len(names))))) if names else set()
    )
    patterns = patterns_of(names, chosen)
    found = {n for n, name in enumerate(names) if any(re.search(x, name) for x in patterns)}
    assert found >= chosen
    if patterns and len(chosen) < 12:
        assert found == chosen
