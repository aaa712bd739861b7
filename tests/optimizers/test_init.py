"""The first state: its arrays can be given away, and it can be made from shapes alone."""

import chex
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import optax_largebatch as lb
from tests.helpers import compiled
from tests.optimizers.checkpointed import CHECKPOINTED, parameters
from tests.optimizers.registry import OPTIMIZERS, WRAPPERS, named

several_devices = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")


def watched(inner):
    return lb.accumulate_gradients(
        lb.chain(lb.measure_noise_scale(), inner), every=2, small_batches=True
    )


def gradients_of(params):
    return jax.tree.map(jnp.cos, params)


def applied(params, updates):
    with jax.numpy_dtype_promotion("standard"):
        return optax.apply_updates(params, updates)


def three_steps(optimizer, donated=(0, 1)):
    """The state is made outside of `jit` and given away in each step."""

    def step(params, state):
        updates, state = optimizer.update(gradients_of(params), state, params)
        return applied(params, updates), state

    donating = compiled(step, donate_argnums=donated)
    params = parameters()
    state = optimizer.init(params)
    for _ in range(3):
        params, state = donating(params, state)
    return params, state


@pytest.mark.parametrize("name", named(OPTIMIZERS))
def test_an_eager_state_can_be_donated(name):
    found, expected = (three_steps(OPTIMIZERS[name].make(), own) for own in ((0, 1), ()))
    chex.assert_tree_all_finite(found)
    chex.assert_trees_all_close(found, expected, rtol=1e-6, atol=1e-7)


def test_an_eager_state_of_all_wrappers_can_be_donated():
    optimizer = watched(OPTIMIZERS["lars"].make())
    for wrap in WRAPPERS.values():
        optimizer = wrap(optimizer)
    chex.assert_tree_all_finite(three_steps(optimizer))


@pytest.mark.slow
@pytest.mark.parametrize("inner", [*WRAPPERS, "noise scale"])
@pytest.mark.parametrize("outer", WRAPPERS)
def test_an_eager_state_of_wrappers_can_be_donated(outer, inner):
    own = OPTIMIZERS["lars"].make()
    own = watched(own) if inner == "noise scale" else WRAPPERS[inner](own)
    chex.assert_tree_all_finite(three_steps(WRAPPERS[outer](own)))


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


@several_devices
@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="jax.shard_map is jax 0.7")
@pytest.mark.parametrize(
    "name", ["lamb", "cain", pytest.param("learned_gradient", marks=pytest.mark.slow)]
)
def test_inside_shard_map_it_is_the_same_for_whole_parameters(name):
    optimizer, params = OPTIMIZERS[name].make(), parameters()
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    state = jax.shard_map(optimizer.init, mesh=mesh, in_specs=P(), out_specs=P())(params)
    chex.assert_trees_all_equal(state, optimizer.init(params))


STACKED = lb.stacked_layers({"layers/": 0})


@several_devices
@pytest.mark.skipif(jax.__version_info__ < (0, 8), reason="older jax needs a mesh to be set")
@pytest.mark.parametrize("spec", [P("data"), P(None, "tensor")], ids=str)
@pytest.mark.parametrize("name", ["lamb", "cain", "learned_gradient"])
def test_on_explicit_axes_no_mesh_need_be_set(name, spec):
    """Stacks that are split between their layers have numbers that are split likewise."""
    optimizer = OPTIMIZERS[name].make(stacked=STACKED)
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    whole = {"head": jnp.ones((4, 2)), "layers": {"kernel": jnp.ones((4, 2, 6))}}
    places = {"head": P(), "layers": {"kernel": spec}}
    params = jax.tree.map(lambda x, own: jax.device_put(x, NamedSharding(mesh, own)), whole, places)
    shardings = lb.optimizer_state_shardings(optimizer, params, mesh)
    state = jax.jit(optimizer.init, out_shardings=shardings)(params)
    chex.assert_trees_all_equal(state, optimizer.init(whole))
    chex.assert_trees_all_equal(optimizer.init(params), state)
