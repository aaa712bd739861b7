"""Scalars that are known when a step is traced are constants of its program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_largebatch as lb
from optax_largebatch.engine.program import Scalars


@pytest.mark.parametrize("numbers", [(1, 1.0, True), (0.5, 0.25), (0.5, np.float32(0.5))])
def test_other_numbers_are_another_program(numbers):
    """Among them equal ones of other types, which promote otherwise."""
    as_array = jax.jit(lambda scalars: jnp.asarray(scalars.tree))
    for number in numbers:
        ours, expected = as_array(Scalars(number)), jnp.asarray(number)
        assert (ours.dtype, ours.weak_type, ours) == (expected.dtype, expected.weak_type, expected)


def test_options_are_no_arguments_of_the_passes():
    params = {"kernel": jnp.ones((64, 32)), "bias": jnp.ones(32)}
    optimizer = lb.lamb(1e-3, b1=0.75, weight_decay=0.375)
    state = optimizer.init(params)
    program = jax.jit(optimizer.update).lower(params, state, params).as_text()
    main = program[program.index("func.func public @main") : program.index("func.func private")]
    assert "7.5" not in main
    assert "3.75" not in main
