"""Where the state of an optimizer lies."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import optax_largebatch as lb
from tests.helpers import mesh_of


def mesh():
    return mesh_of(data=4, tensor=2)


def spec_of_moment(shape, spec=None, axis=None):
    """The spec of the first moment of one parameter."""
    sharding = None if spec is None else NamedSharding(mesh(), spec)
    param = jax.ShapeDtypeStruct(shape, "float32", sharding=sharding)
    shardings = lb.optimizer_state_shardings(lb.lamb(0.1), {"w": param}, mesh(), axis=axis)
    return optax.tree.get(shardings, "mu")["w"].spec


@pytest.mark.parametrize(
    ("shape", "spec", "axis", "expected"),
    [
        ((8, 12), None, None, P()),
        ((8, 12), P(None, "tensor"), None, P(None, "tensor")),
        ((8, 12), None, "data", P(None, "data")),  # the longest
        ((12, 8), None, "data", P("data", None)),
        ((8, 13), None, "data", P("data", None)),  # the only one that four devices divide
        ((3, 5), None, "data", P()),
        ((), None, "data", P()),
        ((8, 12), P(None, "tensor"), "data", P("data", "tensor")),
        ((8, 12), P("data"), "data", P("data")),
        ((8, 24), None, ("data", "tensor"), P(None, ("data", "tensor"))),
        ((8, 24), P("data"), ("data", "tensor"), P("data", "tensor")),
    ],
)
def test_moments_lie_where_their_parameter_lies_or_split_further(shape, spec, axis, expected):
    assert spec_of_moment(shape, spec, axis) == expected


def test_an_axis_that_the_mesh_does_not_have():
    with pytest.raises(ValueError, match="axis names 'fsdp', and the mesh has the axes data, ten"):
        spec_of_moment((8, 12), axis="fsdp")


MEMORIES = {memory.kind for memory in jax.devices()[0].addressable_memories()}


@pytest.mark.skipif("pinned_host" not in MEMORIES, reason="CPUs of jax 0.6 have none")
@pytest.mark.parametrize("make", [lb.lamb, lb.muonh, lb.lans], ids=lambda make: make.__name__)
def test_a_state_in_host_memory(make):
    """It is moved inside the step, takes no room on the devices, and the numbers are the same."""
    optimizer = lb.accumulate_gradients(make(0.1), every=2)
    data = mesh_of(data=8)
    whole = NamedSharding(data, P())
    params = jax.device_put({"kernel": jnp.eye(8) + 1, "bias": jnp.ones(8)}, whole)
    layout = lb.optimizer_state_shardings(optimizer, params, data, axis="data")
    on_host = jax.tree.map(lambda x: x.with_memory_kind("pinned_host"), layout)

    def step(gradients, state):
        return optimizer.update(gradients, jax.device_put(state, layout), params)

    state, expected = jax.jit(optimizer.init, out_shardings=on_host)(params), optimizer.init(params)
    for _ in range(4):
        updates, state = jax.jit(step, out_shardings=(whole, on_host))(params, state)
        alike, expected = jax.jit(optimizer.update)(params, expected, params)
        assert {x.sharding.memory_kind for x in jax.tree.leaves(state)} == {"pinned_host"}
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6), updates, alike)
    if jax.__version_info__ >= (0, 8):  # as the guide says
        with pytest.raises(ValueError, match="memory_space of all inputs"):
            jax.jit(optimizer.update)(params, state, params)
