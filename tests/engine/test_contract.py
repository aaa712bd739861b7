"""What a newcomer gets wrong: each mistake is an error that says what to do, or no mistake."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_largebatch as lb
from optax_largebatch.engine import (
    Counter,
    LeafTransform,
    PerParameter,
    Shared,
    VectorOfBlocks,
    block_norms,
    transformation,
)
from optax_largebatch.testing import reference
from tests.helpers import first_step

SIZES = {"few": 60, "folded": 2**17, "cut into tiles": 2**20, "two tiles and a rest": 2**21 + 77}


class OneArray(NamedTuple):
    own: Any


def mean_free(update, at):
    """A mean over the leaf, taken by the program itself."""
    return update - jnp.mean(update), at.state


def length_of_param(update, at):
    param_norm, update_norm = yield block_norms(at.param, update)
    return param_norm / update_norm * update, at.state


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_mean_of_the_leaf_is_right_at_every_size(size):
    """Of the leaf program, and of a norm after it."""
    chained = lb.chain(
        transformation(mean_free),
        transformation(length_of_param, needs_params=True, given="parts"),
    )
    params = {"leaf": jnp.linspace(1.0, 2.0, size)}
    gradients = {"leaf": jnp.cos(jnp.arange(size, dtype="float32")) + 0.25}
    state = chained.init(params)
    own, expected = (
        jax.jit(update)(gradients, state, params)
        for update in (chained.update, reference(chained).update)
    )
    chex.assert_trees_all_close(own, expected, rtol=2e-5, atol=1e-7)


def test_what_is_shared_may_be_computed_in_a_call_that_closes_over_a_constant():
    known = jnp.asarray(np.float32(2))
    times = jax.jit(lambda x: x * known)

    def leaf(update, at):
        return update, at.state._replace(own=times(at.state.own))

    initial = Shared(lambda params: jnp.ones([]))
    transform = transformation(leaf, state=OneArray(initial))
    params = {"a": jnp.ones(3), "b": jnp.ones((2, 3))}
    _, state = first_step(transform, params, params)
    assert state.own == 2


def test_every_field_has_to_be_declared():
    with pytest.raises(TypeError, match=r"mean_free: the state's field 'own' must say what it is"):
        LeafTransform(mean_free, state=OneArray(own=jnp.zeros(3)))
    with pytest.raises(TypeError, match=r"'own' must say what it is, got <class .*Counter"):
        LeafTransform(mean_free, state=OneArray(own=Counter))
    with pytest.raises(TypeError, match=r"state must be the state's NamedTuple"):
        LeafTransform(mean_free, state=PerParameter())


def test_what_is_declared_is_kept():
    def leaf(update, at):
        return update, at.state._replace(own=at.state.own + update)

    transform = transformation(leaf, state=OneArray(own=PerParameter()))
    state = transform.init(jnp.zeros(3))
    for _ in range(2):
        _, state = transform.update(jnp.ones(3), state)
    np.testing.assert_array_equal(state.own, 2 * np.ones(3))


def yields_an_array(update, at):
    yield update
    return update, at.state


def does_not_yield(update, at):
    norm, other = block_norms(update, update)
    return norm / other * update, at.state


def changes_the_count(update, at):
    return update, at.state._replace(own=at.state.own + 1)


WRONG = {
    "returns the update alone": (lambda update, at: update, {}, "must return the update and"),
    "another shape": (lambda update, at: (update[:2], at.state), {}, r"must keep its shape \(3,\)"),
    "another state": (lambda update, at: (update, (1,)), {}, "must return the state it was given"),
    "yields an array": (yields_an_array, {}, "yields requests, such as block_norms"),
    "counts itself": (
        changes_the_count,
        {"state": OneArray(own=Counter())},
        "the engine counts the steps",
    ),
    "a moment of another shape": (
        lambda update, at: (update, at.state._replace(own=jnp.sum(update))),
        {"state": OneArray(own=PerParameter())},
        r"the state's 'own' must keep its shape \(3,\)",
    ),
    "an array in a vector of blocks": (
        lambda update, at: (update, at.state._replace(own=update)),
        {"state": OneArray(own=VectorOfBlocks())},
        r"the state's 'own' takes one number for each block",
    ),
    "does not yield its request": (does_not_yield, {}, "cannot unpack"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_leaf_program_may_not_do(name):
    leaf, more, message = WRONG[name]
    transform = transformation(leaf, name="mine", **more)
    with pytest.raises((TypeError, ValueError), match=rf"^(mine: .*)?{message}"):
        first_step(transform, jnp.ones(3), jnp.ones(3))


def test_a_vector_of_blocks_takes_a_number_from_each_leaf():
    def leaf(update, at):
        (norm,) = yield block_norms(update)
        return update, at.state._replace(own=norm)

    transform = transformation(leaf, state=OneArray(own=VectorOfBlocks(initial=1.0)), given="parts")
    params = {"a": jnp.ones(4), "b": jnp.zeros([])}
    state = transform.init(params)
    np.testing.assert_array_equal(state.own, [1.0, 1.0])
    _, state = transform.update(params, state)
    np.testing.assert_array_equal(state.own, [2.0, 0.0])


def test_a_transformation_is_shown_in_a_line():
    assert repr(lb.hyperball(1e-3)) == "<hyperball>"
    for make in (lb.lamb, lb.lans, lb.lars, lb.scaled_adam):
        assert len(repr(make(1e-3))) <= 100
    assert "scale_by_adam" in repr(lb.lamb(1e-3))


def test_foreign_transformations_have_no_reference():
    with pytest.raises(TypeError, match=r"reference\(\) takes one made of leaf transforms"):
        reference(optax.sgd(0.1))
