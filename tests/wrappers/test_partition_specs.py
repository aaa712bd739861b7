"""An optimizer that is told where it is built how the parameters are split."""

import re

import chex
import equinox as eqx
from flax import nnx
from flax.training.train_state import TrainState
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import optax
import pytest

import optax_largebatch as lb
from tests.engine.steps import on_shards
from tests.helpers import drawn, first_step, mesh_of, shapes_on, shardings_on
from tests.optimizers.registry import WRAPPERS as REGISTERED

SPECS = {"bias": P(), "first": P("x", "y"), "second": P("y", "x")}


def network():
    return drawn({"bias": (16,), "first": (8, 16), "second": (8, 16)})


def recorder(given):
    """A transformation that notes which specs it is given."""

    def update(updates, state, params=None, *, partition_specs=None, **extra_args):
        given.append(partition_specs)
        return updates, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


@on_shards
@pytest.mark.parametrize("told_as", ["tree", "function", "parameters", "shapes", "variables"])
def test_a_trainer_that_passes_nothing_on_gathers_no_matrix(told_as):
    """Flax's TrainState calls `update(gradients, state, params)`."""
    shardings = shardings_on(mesh_of(x=2, y=4), SPECS)
    params = jax.device_put(network(), shardings)
    specs = {
        "tree": shardings,
        "function": lambda params: {x: shardings[x] for x in params},
        "parameters": params,
        "shapes": shapes_on(params, shardings),
        "variables": {name: nnx.Param(x) for name, x in params.items()},
    }[told_as]
    optimizer = lb.with_partition_specs(lb.muon(0.02, weight_decay=0.1), specs)
    state = TrainState.create(apply_fn=None, params=params, tx=optimizer)

    @jax.jit
    def step(state):
        gradients = jax.tree.map(jnp.cos, state.params)
        return state.apply_gradients(grads=gradients)

    program = step.lower(state).compile().as_text()
    assert len(re.findall(r" all-to-all(?:-start)?\(", program)) == 2
    assert not re.search(r" all-gather(?:-start)?\(", program)
    alone = TrainState.create(apply_fn=None, params=network(), tx=lb.muon(0.02, weight_decay=0.1))
    found = jax.device_get(step(state).params)
    chex.assert_trees_all_close(found, step(alone).params, rtol=1e-5, atol=1e-6)


WRAPPERS = REGISTERED | {
    "alone": lambda inner: inner,
    "accumulate_gradients of 1": lambda inner: lb.accumulate_gradients(inner, every=1),
}
AROUND = WRAPPERS | {
    "optax.chain": lambda inner: optax.chain(optax.clip(1.0), inner),
    "chain": lambda inner: lb.chain(lb.clip_by_value(1.0), inner),
    "masked": lambda inner: optax.masked(inner, {"bias": False, "first": True, "second": True}),
    "others": lambda inner: lb.muon(0.1, others=inner),
}


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("outside", [True, False])
def test_the_specs_reach_the_optimizer_in_every_wrapper(name, outside):
    given, around = [], AROUND[name]
    if outside:
        optimizer = lb.with_partition_specs(around(recorder(given)), P())
    else:
        optimizer = around(lb.with_partition_specs(recorder(given), P()))
    params = network()
    first_step(optimizer, params, params)
    assert given == [P()]


@pytest.mark.parametrize("name", ["average_weights", "master_weights", "stochastic_rounding"])
def test_wrappers_that_need_the_parameters(name):
    optimizer, params = WRAPPERS[name](optax.sgd(0.1)), network()
    with pytest.raises(ValueError, match=f"params must be given to `update`, because {name}"):
        optimizer.update(params, optimizer.init(params))


@on_shards
def test_specs_in_the_boxes_of_nnx():
    """As MaxText has them: `nnx.get_partition_spec` leaves a Variable around each."""
    mesh = mesh_of(x=2, y=4)

    class Model(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("x", "y"), mesh=mesh)
            self.linear = nnx.Linear(8, 16, kernel_init=init, rngs=rngs)

    with jax.set_mesh(mesh):  # flax 0.12.0 does not look at the mesh of the metadata
        boxed = nnx.state(Model(nnx.Rngs(0)), nnx.Param)
    given = []
    for specs in (nnx.get_partition_spec(boxed), nnx.get_named_sharding(boxed, mesh)):
        optimizer = lb.with_partition_specs(recorder(given), specs)
        first_step(optimizer, boxed, boxed)
        own = given[-1]["linear"]["kernel"]
        assert isinstance(own, P | NamedSharding)
        assert getattr(own, "spec", own) == P("x", "y")


def test_what_a_call_passes_takes_precedence():
    given = []
    optimizer = lb.with_partition_specs(recorder(given), P())
    params = network()
    for passed in (None, P(None)):
        first_step(optimizer, params, params, partition_specs=passed)
    assert given == [P(), P(None)]


def test_the_state_is_that_of_the_optimizer():
    params = network()
    optimizer = lb.lamb(0.1)
    wrapped = lb.with_partition_specs(optimizer, P())
    chex.assert_trees_all_equal(wrapped.init(params), optimizer.init(params))


class Called(eqx.Module):
    """A tree that can be called, and is no function of the parameters."""

    kernel: jax.Array

    def __call__(self, x):
        return x @ self.kernel


def test_a_module_that_can_be_called():
    split = NamedSharding(mesh_of(x=2, y=4), P("x", "y"))
    params = jax.device_put(Called(jnp.ones((8, 16))), split)
    axes = jax.tree.map(lambda x: "rows (2 columns)", params)
    optimizer = lb.with_partition_specs(lb.muon(0.1, matrix_axes=axes), params)
    jax.jit(optimizer.update)(params, optimizer.init(params), params)
    lamb = lb.lamb(0.1, stacked=lb.stacked_layers(jax.tree.map(lambda x: 0, params)))
    assert optax.tree.get(lamb.init(params), "trust_ratios").shape == (8,)
    trained = jax.tree.map(lambda x: True, params)
    assert lb.lamb(0.1, weight_decay=0.1, weight_decay_mask=trained).init(params)


@pytest.mark.parametrize("specs", ["fsdp", {"bias": P(), "first": "x"}, 3, {"bias": ("x", None)}])
def test_what_is_no_spec(specs):
    with pytest.raises(TypeError, match=r"partition_specs must be a tree of .*PartitionSpec"):
        lb.with_partition_specs(lb.lamb(0.1), specs)
    optimizer = lb.with_partition_specs(lb.lamb(0.1), lambda params: specs)
    params = network()
    with pytest.raises(TypeError, match=r"partition_specs must be a tree of .*PartitionSpec"):
        first_step(optimizer, params, params)
