"""Where the state of an optimizer lies."""

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import optax
import pytest

import optax_largebatch as lb


def mesh():
    return jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def spec_of_moment(shape, spec=None, axis=None, optimizer=None):
    """The spec of the first moment of one parameter."""
    sharding = None if spec is None else NamedSharding(mesh(), spec)
    param = jax.ShapeDtypeStruct(shape, "float32", sharding=sharding)
    shardings = lb.optimizer_state_shardings(
        optimizer or lb.lamb(0.1), {"w": param}, mesh(), axis=axis
    )
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
