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
    block_rms,
    each_matrix,
    global_norm,
    materialize,
    reference,
    transformation,
)
from optax_largebatch.params.matrices import matrices_of
from optax_largebatch.params.stacked import check_stacked

SIZES = {"few": 60, "folded": 2**17, "cut into tiles": 2**20, "two tiles and a rest": 2**21 + 77}


class OneArray(NamedTuple):
    own: Any


def mean_free(update, at):
    """A mean over the leaf, taken by the program itself."""
    return update - jnp.mean(update), at.state


def length_of_param(update, at):
    param_norm, update_norm = yield block_norms(at.param, update)
    return param_norm / update_norm * update, at.state


def steps(transform, size, **more):
    """One step of a transform and a norm after it, and the same by the reference executor."""
    chained = lb.chain(
        transformation(LeafTransform(transform, **more)),
        transformation(LeafTransform(length_of_param, needs_params=True, given="parts")),
    )
    params = {"leaf": jnp.linspace(1.0, 2.0, size)}
    gradients = {"leaf": jnp.cos(jnp.arange(size, dtype="float32")) + 0.25}
    state = chained.init(params)
    own = jax.jit(chained.update)(gradients, state, params)
    expected = jax.jit(reference(chained).update)(gradients, state, params)
    return own, expected


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_mean_of_the_leaf_is_right_at_every_size(size):
    own, expected = steps(mean_free, size)
    chex.assert_trees_all_close(own, expected, rtol=2e-5, atol=1e-7)
    direction = jnp.cos(jnp.arange(size, dtype="float32")) + 0.25
    direction = direction - direction.mean()
    length = jnp.linalg.norm(jnp.linspace(1.0, 2.0, size)) / jnp.linalg.norm(direction)
    np.testing.assert_allclose(own[0]["leaf"], length * direction, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("program", "culprit"),
    [
        (mean_free, "reduce_sum"),
        (lambda update, at: (jnp.cumsum(update), at.state), "cumsum"),
        (lambda update, at: (update[::-1], at.state), "rev"),
        (lambda update, at: (update * jnp.arange(60.0), at.state), "mul"),
        (lambda update, at: (update * jnp.linspace(0.0, 1.0, 60), at.state), "mul"),
        (lambda update, at: (jax.jit(jnp.sort)(update), at.state), "sort"),
        (
            lambda update, at: (
                update + jax.random.normal(jax.random.key(0), update.shape),
                at.state,
            ),
            "add",
        ),
        (
            lambda update, at: (jax.lax.map(lambda x: 2 * x, update), at.state),
            "scan",
        ),
    ],
    ids=[
        "mean",
        "sum so far",
        "reversed",
        "places",
        "captured array",
        "in a call",
        "random",
        "map",
    ],
)
def test_a_program_that_says_parts_and_needs_the_whole(program, culprit):
    with pytest.raises(
        ValueError, match=rf"`{culprit}` does not look at each element.*given='whole'"
    ):
        steps(program, 60, given="parts")


@pytest.mark.parametrize("constant", [2.0, np.float32(2), np.full((1,), 2, np.float32)], ids=repr)
def test_a_call_inside_a_program_of_parts_may_close_over_a_constant(constant):
    known = jnp.asarray(constant)
    times = jax.jit(lambda x: x * known)
    own, expected = steps(lambda update, at: (times(update), at.state), 60, given="parts")
    chex.assert_trees_all_close(own, expected, rtol=1e-6)


def test_what_is_shared_may_be_computed_in_a_call_that_closes_over_a_constant():
    known = jnp.asarray(np.float32(2))
    times = jax.jit(lambda x: x * known)

    def leaf(update, at):
        return update, at.state._replace(own=times(at.state.own))

    initial = Shared(lambda params: jnp.ones([]))
    transform = transformation(LeafTransform(leaf, state=OneArray(initial)))
    params = {"a": jnp.ones(3), "b": jnp.ones((2, 3))}
    _, state = transform.update(params, transform.init(params))
    assert state.own == 2


def test_the_error_names_the_transform_that_is_wrong():
    def scale_by_mean():
        return transformation(LeafTransform(leaf=mean_free, given="parts", name="scale_by_mean"))

    transform = lb.chain(lb.scale_by_adam(), scale_by_mean(), lb.scale_by_learning_rate(0.1))
    with pytest.raises(ValueError, match=r"^scale_by_mean: the leaf program says given='parts'"):
        transform.update(jnp.ones(3), transform.init(jnp.ones(3)))


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

    transform = transformation(LeafTransform(leaf, state=OneArray(own=PerParameter())))
    state = transform.init(jnp.zeros(3))
    for _ in range(2):
        _, state = transform.update(jnp.ones(3), state)
    np.testing.assert_array_equal(state.own, 2 * np.ones(3))


def one_shared_number(new):
    def leaf(update, at):
        norm, own = yield from both(update)
        return update, at.state._replace(own=new(update, at, norm, own))

    def both(update):
        (own,) = yield block_norms(update)
        (norm,) = yield global_norm(update)
        return norm, own

    return transformation(
        LeafTransform(
            leaf,
            state=OneArray(own=Shared(lambda params: jnp.zeros([]))),
            scalars=lambda state: 0.5,
            choices=lambda leaves: list(range(len(leaves.arrays))),
            name="shared_number",
        )
    )


@pytest.mark.parametrize(
    "new",
    [
        lambda update, at, norm, own: own,
        lambda update, at, norm, own: update[0],
        lambda update, at, norm, own: at.state.own + own * norm,
        lambda update, at, norm, own: jnp.asarray(1.0 + at.choice),
        lambda update, at, norm, own: norm if at.choice else at.state.own,
    ],
    ids=["a norm of the leaf", "an element", "a sum with one", "a choice", "some leaves only"],
)
def test_what_is_shared_may_not_differ_between_leaves(new):
    transform = one_shared_number(new)
    params = {"a": jnp.ones(3), "b": jnp.ones(3)}
    with pytest.raises(ValueError, match=r"^shared_number: the state's field 'own' is Shared"):
        transform.update(params, transform.init(params))


@pytest.mark.parametrize(
    "number",
    [lambda update, at: update[0, 0], lambda update, at: 1.0 + at.choice[0]],
    ids=["an element", "a choice"],
)
def test_numbers_for_matrices_may_not_differ_between_leaves(number):
    def plus(matrix, number):
        return matrix + number

    def leaf(update, at):
        update = yield each_matrix(plus, update, at.choice[1], number(update, at))
        return update, at.state

    def choices(leaves):
        return list(enumerate(matrices_of(None, check_stacked(None), leaves, "plus")))

    transform = transformation(LeafTransform(leaf, choices=choices))
    params = {"a": jnp.ones((2, 3)), "b": jnp.ones((2, 3))}
    with pytest.raises(ValueError, match=r"^each_matrix: its numbers differ"):
        transform.update(params, transform.init(params))


def test_what_jax_has_in_its_caches_says_nothing():
    """Two leaves compute the same; of one of them JAX forgets the inner function in between."""

    @jax.jit
    def inner(x):
        return 2 * x + 1

    def leaf(update, at):
        def outer(x):
            once = inner(x)
            if update.shape == (2,):
                jax.clear_caches()
            return inner(once)

        return update, at.state._replace(own=jax.jit(outer)(at.state.own))

    declared = OneArray(own=Shared(lambda params: jnp.ones([])))
    transform = transformation(LeafTransform(leaf, state=declared, given="parts"))
    params = {"first": jnp.ones(2), "second": jnp.ones(3)}
    _, state = transform.update(params, transform.init(params))
    assert state.own == 7


def test_what_is_shared_may_follow_norms_of_all_leaves():
    transform = one_shared_number(lambda update, at, norm, own: at.state.own + at.scalars * norm)
    params = {"a": jnp.full(3, 2.0), "b": jnp.full((1, 1), 2.0)}
    _, state = transform.update(params, transform.init(params))
    np.testing.assert_allclose(state.own, 0.5 * 4.0, rtol=1e-6)


def products_in(transform, params):
    """The products of matrices in the compiled step, of which each is one kernel or one call."""
    lowered = jax.jit(transform.update).lower(params, transform.init(params), params)
    text = lowered.compile().as_text()
    return text.count(" dot(") + text.count("__onednn$matmul")


@pytest.mark.parametrize("said", [True, False])
def test_a_product_before_a_norm_is_computed_once(said):
    def polar(update, at):
        for _ in range(2):
            update = 1.5 * update - 0.5 * update @ (update.T @ update)
        if said:
            update = yield materialize(update)
        (rms,) = yield block_rms(update)
        return update / rms, at.state

    transform = lb.chain(
        transformation(LeafTransform(polar)), lb.scale_by_trust_ratio(), lb.clip_by_global_norm(1.0)
    )
    params = {"kernel": jnp.eye(48) / 3}
    assert products_in(transform, params) == 4
    own = transform.update(params, transform.init(params), params)
    expected = reference(transform).update(params, transform.init(params), params)
    chex.assert_trees_all_close(own, expected, rtol=1e-5, atol=1e-7)


def test_a_plain_function_is_a_leaf_program():
    transform = transformation(LeafTransform(lambda update, at: (2 * update, at.state)))
    updates, _ = transform.update(jnp.ones(3), transform.init(jnp.ones(3)))
    np.testing.assert_array_equal(updates, 2 * np.ones(3))


def yields_an_array(update, at):
    yield update
    return update, at.state


def changes_the_count(update, at):
    return update, at.state._replace(own=at.state.own + 1)


WRONG = {
    "returns the update alone": (lambda update, at: update, {}, "must return the update and"),
    "returns three": (lambda update, at: (update, at.state, 1), {}, "must return the update and"),
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
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_leaf_program_may_not_do(name):
    leaf, more, message = WRONG[name]
    transform = transformation(LeafTransform(leaf, name="mine", **more))
    with pytest.raises((TypeError, ValueError), match=rf"^mine: .*{message}"):
        transform.update(jnp.ones(3), transform.init(jnp.ones(3)))


def test_a_vector_of_blocks_takes_a_number_from_each_leaf():
    def leaf(update, at):
        (norm,) = yield block_norms(update)
        return update, at.state._replace(own=norm)

    transform = transformation(
        LeafTransform(leaf, state=OneArray(own=VectorOfBlocks(initial=1.0)), given="parts")
    )
    params = {"a": jnp.ones(4), "b": jnp.zeros([])}
    state = transform.init(params)
    np.testing.assert_array_equal(state.own, [1.0, 1.0])
    _, state = transform.update(params, state)
    np.testing.assert_array_equal(state.own, [2.0, 0.0])


def test_a_transformation_is_shown_in_a_line():
    assert repr(lb.scale_by_trust_ratio()) == "<scale_by_trust_ratio>"
    for make in (lb.lamb, lb.lans, lb.lars, lb.scaled_adam):
        assert len(repr(make(1e-3))) <= 100
    assert "scale_by_adam" in repr(lb.lamb(1e-3))


def test_foreign_transformations_have_no_reference():
    with pytest.raises(TypeError, match=r"reference\(\) takes one made of leaf transforms"):
        reference(optax.sgd(0.1))
