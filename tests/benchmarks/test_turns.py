"""Turns, and what is made of them."""

import csv

import chex
import jax
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import pytest

from benchmarks.compiled_step.products import Products
from benchmarks.harness.optimizers import made_for
from benchmarks.harness.results import write_csv
from benchmarks.harness.steps import in_a_loop, step_of
from benchmarks.harness.trees import TREES
from benchmarks.harness.turns import in_turns, ratio
from tests.conftest import slow_but


class Recorded:
    """Takes as many seconds as it is told, and notes who was asked."""

    def __init__(self, name, seconds, asked):
        self.name, self.seconds, self.asked = name, iter(seconds), asked

    def run(self):
        self.asked.append(self.name)
        return next(self.seconds)


def recorded(asked, **seconds):
    return {name: Recorded(name, own, asked) for name, own in seconds.items()}


def test_takes_turns_leaves_out_the_first_and_keeps_the_parts():
    asked = []
    parts = [(9.0, 9.0), (8.0, 8.0), (1.0, 2.0)]
    seconds = in_turns(recorded(asked, a=parts, b=[9.0, 8.0, 3.0]), 1, left_out=2)
    assert asked == ["a", "b"] * 3
    assert_array_equal(seconds["a"], [[1, 2]])
    assert_array_equal(seconds["b"], [3])


def test_shuffled_rounds_have_everyone_once_in_changing_order():
    asked = []
    in_turns(recorded(asked, a=np.ones(21), b=np.ones(21), c=np.ones(21)), 20, shuffled=True)
    rounds = [tuple(asked[start : start + 3]) for start in range(0, 63, 3)]
    assert all(sorted(own) == ["a", "b", "c"] for own in rounds)
    assert len(set(rounds)) > 3


def test_ratios_are_taken_turn_by_turn():
    """A machine that is ten times as slow in every other turn changes no ratio."""
    speed = np.where(np.arange(40) % 2, 10.0, 1.0)
    result = ratio(speed * 1.3, speed)
    assert_allclose(result, 1.3)
    assert result.as_row(2) == {"ratio": 1.3, "ratio_low": 1.3, "ratio_high": 1.3}
    spread = ratio(np.arange(11.0), np.ones(11))
    assert (spread.low, spread.median, spread.high) == pytest.approx((1, 5, 9))


def test_writes_the_columns_of_the_rows_into_a_new_folder(tmp_path):
    path = tmp_path / "new" / "table.csv"
    write_csv([{"name": "a, b", "ratio": 1.5}, {"name": "c", "ratio": None}], path)
    assert path.read_bytes() == b'name,ratio\n"a, b",1.5\nc,\n'
    assert [row["name"] for row in csv.DictReader(path.read_text().splitlines())] == ["a, b", "c"]


@pytest.mark.parametrize("name", slow_but(("lamb",), ["lamb", "muon"]))
def test_turns_in_one_program_are_the_steps_of_as_many_calls(name):
    """And no product leaves the loop, though its gradients are the same in every turn."""
    step = step_of(made_for(name, TREES["tiny"]))
    params, gradients = TREES["tiny"].arrays(), TREES["tiny"].arrays()
    start = params, made_for(name, TREES["tiny"]).init(params)
    once = jax.jit(step).lower(*start, gradients).compile()
    loop = jax.jit(in_a_loop(step, 3)).lower(*start, gradients).compile()
    after = start
    for _ in range(3):
        after = once(*after, gradients)
    chex.assert_trees_all_close(loop(*start, gradients), after, rtol=1e-5, atol=1e-6)
    of_a_turn = Products(once.as_text()).operations
    assert Products(loop.as_text()).operations == 3 * of_a_turn
    assert (of_a_turn > 0) == (name == "muon")
