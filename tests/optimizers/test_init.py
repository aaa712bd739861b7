"""The first state: its arrays can be given away, and it can be made from shapes alone."""

import chex
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import optax_largebatch as lb
from tests.helpers import compiled, mesh_of, shardings_on
from tests.optimizers.checkpointed import CHECKPOINTED, parameters, watched
from tests.optimizers.registry import OPTIMIZERS, WRAPPERS, named

several_devices = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")


def assert_donates(optimizer):
    """The state is made outside of `jit` and given away in each step."""

    def step(params, state):
        updates, state = optimizer.update(jax.tree.map(jnp.cos, params), state, params)
        with jax.numpy_dtype_promotion("standard"):
            return optax.apply_updates(params, updates), state

    donating = compiled(step, donate_argnums=(0, 1))
    params = parameters()
    state = optimizer.init(params)
    for _ in range(3):
        params, state = donating(params, state)
    chex.assert_tree_all_finite((params, state))


@pytest.mark.parametrize("name", named(OPTIMIZERS))
def test_an_eager_state_can_be_donated(name):
    assert_donates(OPTIMIZERS[name].make())


def test_an_eager_state_of_all_wrappers_can_be_donated():
    optimizer = watched(OPTIMIZERS["lars"].make())
    for wrap in WRAPPERS.values():
        optimizer = wrap(optimizer)
    assert_donates(optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("inner", [*WRAPPERS, "noise scale"])
@pytest.mark.parametrize("outer", WRAPPERS)
def test_an_eager_state_of_wrappers_can_be_donated(outer, inner):
    own = OPTIMIZERS["lars"].make()
    own = watched(own) if inner == "noise scale" else WRAPPERS[inner](own)
    assert_donates(WRAPPERS[outer](own))


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_from_shapes_it_is_the_same(name):
    optimizer = CHECKPOINTED[name]()
    params = parameters()
    shapes = jax.eval_shape(lambda: params)
    state, expected = optimizer.init(shapes), optimizer.init(params)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, expected)
    abstract = [x for x in jax.tree.leaves(state) if isinstance(x, jax.ShapeDtypeStruct)]
    assert [x.shape for x in abstract] == ([(8,)] if name == "mixed precision" else [])
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        if not isinstance(one, jax.ShapeDtypeStruct):  # a master is what its parameter is
            np.testing.assert_array_equal(one, other)


STACKED = lb.stacked_layers({"layers/": 0})


@several_devices
@pytest.mark.skipif(jax.__version_info__ < (0, 8), reason="older jax needs a mesh to be set")
@pytest.mark.parametrize("spec", [P("data"), P(None, "tensor")], ids=str)
@pytest.mark.parametrize("name", ["lamb", "cain", "learned_gradient"])
def test_on_explicit_axes_no_mesh_need_be_set(name, spec):
    """Stacks that are split between their layers have numbers that are split likewise."""
    optimizer = OPTIMIZERS[name].make(stacked=STACKED)
    mesh = mesh_of(AxisType.Explicit, data=4, tensor=2)
    whole = {"head": jnp.ones((4, 2)), "layers": {"kernel": jnp.ones((4, 2, 6))}}
    places = {"head": P(), "layers": {"kernel": spec}}
    params = jax.device_put(whole, shardings_on(mesh, places))
    shardings = lb.optimizer_state_shardings(optimizer, params, mesh)
    state = jax.jit(optimizer.init, out_shardings=shardings)(params)
    chex.assert_trees_all_equal(state, optimizer.init(whole))
    chex.assert_trees_all_equal(optimizer.init(params), state)
