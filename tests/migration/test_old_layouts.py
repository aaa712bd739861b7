"""States of version 0.1.0, whose numbers for each block were trees like the parameters."""

import chex
from flax import nnx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import optax
import pytest

import optax_largebatch as lb
from tests.conftest import slow_but
from tests.migration.old_runs import AFTER, BEFORE, MUONH, RUNS, go_on, recorded

QUICK = ("muonh with a head", "adamh")


@pytest.mark.parametrize("name", slow_but(QUICK, RUNS))
def test_a_run_goes_on(name):
    params, state, end = recorded(name)
    optimizer = RUNS[name]()
    has_buffer = bool(optax.tree.get_all_with_path(optimizer.init(params), "trace"))
    old_optimizer = optimizer if has_buffer else None
    adopted = lb.adopt_state(optimizer, params, state, old_optimizer=old_optimizer)
    chex.assert_trees_all_equal_shapes_and_dtypes(adopted, optimizer.init(params))
    params, _ = go_on(optimizer, params, adopted, BEFORE, AFTER)
    chex.assert_trees_all_close(params, end, rtol=1e-5, atol=1e-5)


def norms(params):
    """The norm of the head, and of each kernel of the stack."""
    return np.linalg.norm(params["head"]), np.linalg.norm(params["layers"]["kernel"], axis=(1, 2))


@pytest.mark.parametrize("name", ["muonh", "muonh with a head", "muonh beside lamb", "adamh"])
def test_radii_are_those_of_the_start(name):
    params, state, _ = recorded(name)
    optimizer = RUNS[name]()
    longer = jax.tree.map(lambda x: 2 * x, params)
    adopted = lb.adopt_state(optimizer, longer, state)
    moved, _ = go_on(optimizer, longer, adopted, BEFORE, 1)
    for found, expected in zip(norms(moved), norms(params), strict=True):
        assert_allclose(found, expected, rtol=1e-5)


def test_numbers_of_blocks_are_laid_out_anew():
    params, state, _ = recorded("scaled_adam")
    optimizer = RUNS["scaled_adam"]()
    adopted = lb.adopt_state(optimizer, params, state, old_optimizer=optimizer)
    old = state["2"]["0"]["1"]["rms"]
    layers = [jnp.ravel(old["layers"][name]) for name in ("bias", "kernel")]
    in_order = [old["embed"][None], old["head"][None], *layers, old["scale"][None]]
    assert_array_equal(adopted[1][0][1].rms, jnp.concatenate(in_order))


def test_another_stack_is_refused():
    params, state, _ = recorded("cain")
    new = lb.cain(0.1, stacked={})
    with pytest.raises(ValueError, match=r"the .* in state has the shapes .* the same `stacked`"):
        lb.adopt_state(new, params, state)


@jax.tree_util.register_pytree_node_class
class Named:
    """A node without keys, as the `NamedArray` of Haliax."""

    def __init__(self, array):
        self.array = array

    def tree_flatten(self):
        return (self.array,), None

    @classmethod
    def tree_unflatten(cls, _, arrays):
        return cls(*arrays)


BOXES = {
    "none": lambda x: x,
    "linen": lambda x: nn.Partitioned(x, names=(None, None)),
    "nnx": nnx.Param,
    "Haliax": Named,
}


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("seen_by", ["both", "muonh alone"])
def test_what_was_hidden_in_its_box(box, seen_by):
    """Now the whole box is hidden. The bias had no radius, if another optimizer moved it."""
    put, hidden = BOXES[box], optax.MaskedNode()
    arrays = {"bias": jnp.ones(3), "kernel": jnp.ones((2, 3))}

    def tree(**shown):
        return {name: put(shown.get(name, hidden)) for name in arrays}

    params, count = tree(**arrays), jnp.array(4)
    sphere = (count, jnp.ones(1), jnp.ones(1), tree(kernel=jnp.array(7.0)))
    matrices = lb.states.OrthogonalizeMomentumState(count, tree(kernel=2 * arrays["kernel"]))
    vectors = optax.ScaleByAdamState(count, tree(bias=arrays["bias"]), tree(bias=arrays["bias"]))
    state = optax.transforms.PartitionState(
        {
            "muonh": optax.MaskedState((matrices, lb.states.HyperballState(*sphere))),
            "others": optax.MaskedState((vectors, optax.ScaleByScheduleState(count))),
        }
    )
    others = optax.adam(0.1) if seen_by == "muonh alone" else None
    optimizer = lb.muonh(0.1, radius="start", others=others)
    adopted = lb.adopt_state(optimizer, params, state)
    expected = optimizer.init(params)
    chex.assert_trees_all_equal_shapes_and_dtypes(adopted, expected)
    radii = optax.tree.get(adopted, "radii")
    assert_array_equal(radii, [7] if others else [0, 7])
    momenta = [
        x for _, mu in optax.tree.get_all_with_path(adopted, "mu") for x in jax.tree.leaves(mu)
    ]
    assert {x.shape: float(x.mean()) for x in momenta} == {(3,): 1, (2, 3): 2}


def test_masters_keep_their_precision():
    wrapped = lb.master_weights(lb.muonh(0.1, **MUONH))
    params, *_ = recorded("muonh")
    halves = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    state = wrapped.init(halves)._replace(master=params)
    adopted = lb.adopt_state(wrapped, halves, state)
    chex.assert_trees_all_equal(adopted.master, params)
    without = wrapped.init(params)  # parameters of float32 need none
    adopted = lb.adopt_state(wrapped, halves, without)
    chex.assert_trees_all_equal(adopted.master, wrapped.init(halves).master)
