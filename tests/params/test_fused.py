"""Texts that say how the axes of a parameter are cut, and the typing errors in them."""

import jax.numpy as jnp
import pytest

import optax_largebatch as lb
from optax_largebatch.params.fused import read_fused

SHAPES = {2: (8, 12), 3: (2, 8, 12)}


def read(text, ndim=2, argument="stacked_layers"):
    return read_fused(argument, "w", SHAPES[ndim], text)


@pytest.mark.parametrize(
    ("word", "meant"),
    [("row", "rows"), ("Rows", "rows"), ("ROWS", "rows"), ("rowss", "rows"), ("rwos", "rows"),
     ("input", "rows"), ("inputs", "rows"), ("column", "columns"), ("Columns", "columns"),
     ("colums", "columns"), ("collumns", "columns"), ("col", "columns"), ("cols", "columns"),
     ("output", "columns"), ("Outputs", "columns")],
)  # fmt: skip
def test_a_word_that_is_nearly_a_side(word, meant):
    """It would count as a stack, and each of its indices as a matrix of its own."""
    text = f"{word} (3 columns)" if meant == "rows" else f"rows (3 {word})"
    for argument in ("matrix_axes", "stacked_layers"):
        says = f"^{argument}: .* it has '{word}', .* did you mean '{meant}'"
        with pytest.raises(ValueError, match=says):
            read(text, argument=argument)


@pytest.mark.parametrize(
    "name", ["layers", "layer", "heads", "experts", "L", "groups", "blocks", "kv", "channels"]
)
def test_a_name_of_a_stack(name):
    assert read(f"{name} rows columns", 3) == ((1,), (2,), None)
    assert read(f"rows ({name} columns=6)")[2].number == 2


@pytest.mark.parametrize(
    ("text", "ndim", "says"),
    [("", 2, "has 0 items for 2 axes"), ("  ", 2, "has 0 items for 2 axes"),
     ("(3 columns", 2, "has parentheses"), ("rows (3 columns))", 2, "has parentheses"),
     ("layers rows ((3 columns)", 3, "has parentheses"), ("((8 rows)) columns", 2, "has parenth"),
     ("rows (3 (2 columns))", 2, "has parentheses"), (")rows columns(", 2, "has parentheses"),
     ("rows ()", 2, r"has \(\), in which there is no word"),
     ("rows (3, columns)", 2, "has '3,', which is no number, no name, and no sum of parts")],
)  # fmt: skip
def test_a_text_that_is_not_whole(text, ndim, says):
    with pytest.raises(ValueError, match=rf"^stacked_layers: .* of shape .*: it {says}"):
        read(text, ndim)


@pytest.mark.parametrize("rows", [8, 12])
def test_a_text_that_cuts_rows_and_columns(rows):
    """The argument and the parameter are named, though norms are what cannot be taken."""
    params = {"a": {"qkv": jnp.ones((12, 12))}, "b": {"qkv": jnp.ones((rows, 12))}}
    text = {"b/qkv": "(2 rows) (3 columns)"}
    for argument, make in {
        "stacked_layers": lambda: lb.lamb(0.1, stacked=text),
        "matrix_axes": lambda: lb.muonh(0.1, matrix_axes=text, stacked={}),
    }.items():
        with pytest.raises(ValueError, match=rf"^{argument}: .* must cut one axis of 'b/qkv'"):
            make().init(params)


def test_an_array_without_elements():
    for argument in ("stacked_layers", "matrix_axes"):
        with pytest.raises(ValueError, match=rf"^{argument}: .* it cuts an array without elements"):
            read_fused(argument, "w", (0, 12), "rows columns=4+4+4")
    assert read_fused("matrix_axes", "w", (0, 8, 12), "layers rows columns") == ((1,), (2,), None)
