"""The table of state memory in docs/algorithms/icefall.md, against the states themselves."""

import math
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

import optax_largebatch as lb

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "algorithms" / "icefall.md").read_text()
ROWS = {
    cells[0].strip("`"): cells[1:]
    for line in PAGE.split("\n## State\n")[1].split("\n## ")[0].splitlines()
    if line.startswith("| `") and (cells := [cell.strip() for cell in line.strip("|").split("|")])
}


def floats_of_state(name, shape):
    """The sizes of the state's arrays of floating point numbers."""
    state = jax.eval_shape(getattr(lb, name)().init, jax.ShapeDtypeStruct(shape, "float32"))
    arrays = jax.tree.leaves(state)
    return [x for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)]


def numbers(cell):
    """The first number of a cell, 0 if there is none."""
    return int((re.findall(r"\d+", cell) or ["0"])[0])


NAMES = ["eve", "cain", "learned_gradient", "scaled_adam"]


@pytest.mark.parametrize("name", NAMES)
def test_the_table_is_true(name):
    tensors, for_each_axis, for_each_block, for_all, _ = ROWS[name]
    shape = (48, 32, 16)
    entries = sum(n * n if "matri" in for_each_axis else n for n in shape)
    expected = (
        numbers(tensors) * math.prod(shape)
        + numbers(for_each_axis) * entries
        + numbers(for_each_block)
        + numbers(for_all)
        + 1  # the learning rate
    )
    assert sum(x.size for x in floats_of_state(name, shape)) == expected


@pytest.mark.parametrize("name", NAMES)
def test_bytes_for_each_parameter(name):
    shape = (512, 512)
    arrays = floats_of_state(name, shape)
    each = sum(x.size * x.dtype.itemsize for x in arrays) / math.prod(shape)
    assert f"{each:.2f}" == ROWS[name][-1]


def test_all_four_are_in_the_table():
    assert list(ROWS) == NAMES
