"""The check of a transform of one's own finds each mistake, and passes our own transforms."""

import contextlib
import dataclasses
import itertools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_largebatch as lb
from optax_largebatch.engine import (
    NumberPerBlock,
    PerParameter,
    Shared,
    VectorOfBlocks,
    block_norms,
    each_matrix,
    global_norm,
    hoist,
    materialize,
    sums_over_devices,
    transformation,
)
from optax_largebatch.engine.execution_plans import SEVERAL_DEVICES
from optax_largebatch.params.matrix_axes import matrices_of
from optax_largebatch.params.stacked import check_stacked
from optax_largebatch.testing import check
from optax_largebatch.testing.check import PLANS
from tests.helpers import first_step

PARAMS = {
    "bias": jnp.linspace(0.5, 2.0, 60),
    "kernel": jnp.sin(jnp.arange(240.0)).reshape(6, 40),
    "scale": jnp.linspace(1.0, 2.0, 60),
}
KERNELS = {
    "a": PARAMS["kernel"],
    "b": 2 * PARAMS["kernel"][:, :20],
    "c": jnp.cos(PARAMS["kernel"]),
}


class OneArray(NamedTuple):
    own: Any


def mine(leaf, **settings):
    return transformation(leaf, name="mine", **settings)


def in_parts(leaf, **settings):
    return mine(leaf, given="parts", **settings)


def finds(transform, params, message):
    """The check finds the mistake, or none if there is no message."""
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        check(transform, params)


def less_than_a_block(update, at):
    (norm,) = yield block_norms(update - jnp.max(update))
    return norm * update, at.state


NEEDS_THE_WHOLE = {
    "mean": lambda update, at: (update - jnp.mean(update), at.state),
    "sum so far": lambda update, at: (jnp.cumsum(update), at.state),
    "captured array": lambda update, at: (update * jnp.linspace(0.0, 1.0, 60), at.state),
    "asks for less than a block": less_than_a_block,
}


@pytest.mark.parametrize("name", NEEDS_THE_WHOLE)
def test_a_program_that_says_parts_and_needs_the_whole(name):
    with pytest.raises(ValueError, match=r"^mine: the leaf program says given='parts'.*'whole'"):
        check(in_parts(NEEDS_THE_WHOLE[name]), {key: PARAMS[key] for key in ("bias", "scale")})


def test_a_program_on_single_elements_may_say_parts():
    check(in_parts(lambda update, at: (jax.lax.map(lambda x: 2 * x, update), at.state)), PARAMS)


def one_shared_number(new):
    def leaf(update, at):
        (of_leaf,) = yield block_norms(update)
        (norm,) = yield global_norm(update)
        return update, at.state._replace(own=new(update, at, norm, of_leaf))

    return mine(
        leaf,
        state=OneArray(own=Shared(lambda params: jnp.zeros([]))),
        scalars=lambda state: 0.5,
        choices=lambda leaves: list(range(len(leaves.arrays))),
    )


DIFFERENT = {
    "a norm of the leaf": lambda update, at, norm, of_leaf: of_leaf,
    "some leaves only": lambda update, at, norm, of_leaf: norm if at.choice else at.state.own,
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_is_shared_may_not_differ_between_leaves(name):
    with pytest.raises(ValueError, match=r"^mine: the state's field 'own' is Shared"):
        check(one_shared_number(DIFFERENT[name]), PARAMS)


def test_what_is_shared_may_follow_norms_of_all_leaves():
    check(one_shared_number(lambda update, at, norm, _: at.state.own + at.scalars * norm), PARAMS)


def test_numbers_for_matrices_may_not_differ_between_leaves():
    def plus(matrix, number):
        return matrix + number

    def leaf(update, at):
        update = yield each_matrix(plus, update, at.choice, update[0, 0])
        return update, at.state

    def choices(leaves):
        return matrices_of(None, check_stacked(None), leaves, "plus")

    with pytest.raises(ValueError, match=r"^mine: a number given to each_matrix differs"):
        check(mine(leaf, choices=choices), KERNELS)


@pytest.mark.parametrize("said", [True, False])
def test_a_product_that_each_pass_would_do_again(said):
    def leaf(update, at):
        for _ in range(2):
            update = 1.5 * update - 0.5 * update @ (update.T @ update)
        if said:
            update = yield materialize(update)
        (norm,) = yield block_norms(update)
        return update / norm, at.state

    message = None if said else r"^mine: for a leaf of shape \(48, 48\), work is done again"
    finds(mine(leaf), {"a": jnp.eye(48) / 3, "b": jnp.eye(48) / 4}, message)


def ratio(stacked, axes):
    """A trust ratio, which takes its norms along `axes`, or along all that are not stacked."""

    def leaf(update, at):
        if axes is None:
            param_norm, update_norm = yield block_norms(at.param, update)
        else:
            param_norm = jnp.linalg.norm(at.param)
            update_norm = jnp.linalg.norm(update)
        return param_norm / update_norm * update, at.state

    return mine(leaf, needs_params=True, stacked=stacked)


def test_a_norm_of_a_whole_stack():
    with pytest.raises(ValueError, match=r"layers stacked in one array.*stacked=stacked"):
        check(lambda stacked: ratio({}, None), PARAMS)
    with pytest.raises(ValueError, match=r"layers stacked in one array.*at\.stacked"):
        check(lambda stacked: ratio(stacked, "all"), PARAMS)


@pytest.mark.parametrize("change", ["another request", "no request"])
def test_a_program_that_asks_for_something_else_when_it_runs_again(change):
    runs = itertools.count()

    def leaf(update, at):
        run = next(runs)
        if change == "another request":
            (norm,) = yield block_norms(update) if run % 2 else global_norm(update)
            update = norm * update
        elif run <= 12:  # as the reference takes its steps, and once more
            yield block_norms(update)
        return update, at.state

    with pytest.raises(RuntimeError, match=r"^mine: the leaf program must ask for the same things"):
        check(in_parts(leaf), PARAMS)


def test_a_program_that_uses_parameters_and_does_not_say_so():
    def leaf(update, at):
        return update + at.param, at.state

    with pytest.raises(ValueError, match=r"^mine: without parameters.*needs_params=True"):
        check(in_parts(leaf), PARAMS)


def first_axis(update, at):
    """The layers of a stack, as if they were always along axis 0."""
    rest = tuple(range(1 if at.stacked else 0, update.ndim))
    return update / jnp.sqrt(jnp.sum(update**2, rest, keepdims=True)), at.state


def one_number_for_all_layers(update, at):
    (norm,) = yield block_norms(update, kept=())
    return update, at.state._replace(own=norm)


def sum_of_its_part(update, at):
    return update * jnp.sum(update), at.state


def chosen_by_shape(update, at):
    return at.choice * update, at.state


def sizes(leaves):
    return [float(x.size) for x in leaves.arrays]


def sum_over_rows(update, at):
    (total,) = yield sums_over_devices(jnp.sum(update, 0, keepdims=True))
    return update * total, at.state


# In the last one it is only the second axis that makes a difference.
RIGHT_ON_ONE_DEVICE = {
    "a sum of its part": (sum_of_its_part, {}, PARAMS, 0),
    "a choice by the shape of a shard": (chosen_by_shape, {"choices": sizes}, PARAMS, 0),
    "a sum over rows": (sum_over_rows, {}, {"a": KERNELS["a"], "b": KERNELS["c"]}, 1),
}


@pytest.mark.skipif(
    jax.device_count() == 1 or not hasattr(jax, "shard_map"),
    reason="needs two devices, and jax.shard_map",
)
@pytest.mark.parametrize("name", RIGHT_ON_ONE_DEVICE)
def test_numbers_that_depend_on_the_device(name):
    leaf, settings, params, axis = RIGHT_ON_ONE_DEVICE[name]
    message = rf"^mine: with axis {axis} split between devices"
    finds(mine(leaf, given="shards", **settings), params, message)


@pytest.mark.parametrize(
    ("leaf", "what"),
    [
        (first_axis, "along axis -1, get other updates"),
        (one_number_for_all_layers, "along axis 0, get other numbers for each layer in the state"),
    ],
)
def test_layers_that_are_mixed_up(leaf, what):
    def make(stacked):
        return mine(leaf, state=OneArray(own=VectorOfBlocks()), stacked=stacked)

    finds(make, PARAMS, what)


@pytest.mark.parametrize("given", ["whole", "parts"])
def test_a_norm_of_each_row(given):
    def leaf(update, at):
        (norms,) = yield block_norms(update, kept=(0,))
        return update / norms, at.state

    message = r"^mine: .* sums that keep the axes \(0,\).* say given='whole' or 'shards'"
    kernels = {"a": KERNELS["a"], "c": KERNELS["c"]}
    finds(mine(leaf, given=given), kernels, message if given == "parts" else None)


def test_stacked_is_passed_by_its_name():
    """Wherever it stands: a `beta` in front of it would take it otherwise."""

    def scaled(beta=0.5, stacked=None):
        def leaf(g, at):
            (norm,) = yield block_norms(g)
            return beta * g / norm, at.state

        return in_parts(leaf, stacked=stacked)

    vectors = {key: PARAMS[key] for key in ("bias", "scale")}
    check(scaled, vectors)
    check(lambda own: scaled(0.9, own), vectors)


def test_the_rank_of_a_part_is_not_that_of_its_leaf():
    def leaf(g, at):
        return (2 * g if g.ndim < 2 else g), at.state

    finds(in_parts(leaf), PARAMS, "choose by `at.choice` in place of the shape or `ndim`")


def test_an_axis_of_the_layers_is_not_one_of_the_leaf():
    def rows(stacked):
        def leaf(g, at):
            (norms,) = yield block_norms(g, kept=(0,))
            return g / norms, at.state

        return mine(leaf, stacked=stacked)

    finds(rows, PARAMS, "look at `at.stacked` where the leaf program uses axes, as in `kept=`")


def test_an_error_of_the_program_is_shown_as_it_is():
    """And not as one of missing parameters."""

    def leaf(g, at):
        return g @ "a matrix", at.state

    with pytest.raises(TypeError, match="unsupported operand"):
        check(mine(leaf), PARAMS)


def test_leaves_that_are_alike_are_wanted():
    with pytest.raises(ValueError, match=r"two arrays of the same shape.* \(60,\), \(6, 40\)\."):
        check(lb.clip_by_value(1.0), {"bias": PARAMS["bias"], "kernel": PARAMS["kernel"]})


def two_rounds_and_then_numbers(stacked):
    """What a number follows from is known after the second round, and not before."""

    def leaf(update, at):
        (norm,) = yield block_norms(update)
        (other,) = yield block_norms(update / norm - at.param)
        (ratio,) = yield hoist(other / norm)
        return ratio * update, at.state

    return in_parts(leaf, needs_params=True, stacked=stacked)


def test_blocks_of_one_element():
    """The numbers of such blocks have the shape of their leaf."""
    check(follows_its_norms, {"a": jnp.asarray(2.0), "b": jnp.asarray(-3.0), "c": jnp.ones((2, 1))})


def links(optimizer, clip):
    return [optimizer(0.1, ns_steps=1, others=lb.lamb(0.1, max_grad_norm=0.5)), clip]


NORM_OF_ALL_BEHIND = {
    "muon": links(lb.muon, lb.clip_by_global_norm(0.05)),
    "muonh": links(lb.muonh, lb.clip_by_median_norm(1e-3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NORM_OF_ALL_BEHIND)
def test_a_norm_of_all_leaves_behind_one_of_a_part(name):
    check(lb.chain(*NORM_OF_ALL_BEHIND[name]), PARAMS)


@pytest.mark.parametrize("links", NORM_OF_ALL_BEHIND.values(), ids=NORM_OF_ALL_BEHIND)
def test_each_norm_is_of_the_leaves_that_its_transform_works_on(links):
    """As in optax, which runs link by link."""
    gradients = jax.tree.map(jnp.cos, PARAMS)
    ours, theirs = (
        first_step(own, gradients, PARAMS)[0] for own in (lb.chain(*links), optax.chain(*links))
    )
    chex.assert_trees_all_close(ours, theirs, rtol=1e-5)


def test_sums_that_are_wrong_in_one_place(monkeypatch):
    """The table of places has a row whose sums forget a statistic."""
    wrong = dataclasses.replace(
        SEVERAL_DEVICES, sums=lambda asked, *_: [jnp.ones([]) for _ in asked]
    )
    monkeypatch.setitem(PLANS, "several devices", wrong)
    with pytest.raises(ValueError, match=r"^mine: as it runs on several devices"):
        check(follows_its_norms(None), PARAMS)


def test_only_our_own_are_checked():
    with pytest.raises(TypeError, match=r"check\(\) takes one made of leaf transforms"):
        check(optax.sgd(0.1), PARAMS)


def follows_its_norms(stacked):
    """A state of each kind that goes by blocks, and a number that the last pass needs."""

    class State(NamedTuple):
        mu: Any
        norm: Any
        ratios: Any

    def leaf(update, at):
        mu = yield materialize(at.state.mu + update)
        norm, param_norm = yield block_norms(mu, at.param)
        (ratio,) = yield hoist(param_norm / (norm + at.state.norm))
        return ratio * mu, at.state._replace(mu=mu, norm=norm, ratios=ratio)

    state = State(PerParameter(), NumberPerBlock(), VectorOfBlocks())
    return in_parts(leaf, state=state, needs_params=True, stacked=stacked)


RIGHT = {
    "numbers after a second round": two_rounds_and_then_numbers,
    "fields and numbers that go by blocks": follows_its_norms,
}


@pytest.mark.parametrize("name", RIGHT)
def test_no_mistake(name):
    check(RIGHT[name], PARAMS)
