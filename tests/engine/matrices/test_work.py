"""The order in which devices exchange matrices and work on them."""

from collections.abc import Iterator

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Var
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import pytest

import optax_largebatch as lb

several_devices = pytest.mark.skipif(
    jax.device_count() < 8 or not hasattr(jax, "shard_map"),
    reason="needs eight devices, and jax.shard_map",
)


def programs_in(equation) -> Iterator[Jaxpr]:
    for value in equation.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            if isinstance(inner, Jaxpr | ClosedJaxpr):
                yield getattr(inner, "jaxpr", inner)


def waits_for(jaxpr, of_inputs, found):
    """What each result of a program waits for, of "product" and "all_to_all".

    Appends to `found` what each all-to-all waits for, in order.
    """
    nothing = frozenset()
    known = dict(zip(jaxpr.invars, of_inputs, strict=True))
    for equation in jaxpr.eqns:
        before = [known.get(x, nothing) if isinstance(x, Var) else nothing for x in equation.invars]
        after = nothing.union(*before)
        if equation.primitive.name == "all_to_all":
            found.append(after)
            after |= {"all_to_all"}
        elif equation.primitive.name == "dot_general":
            after |= {"product"}
        results = [after] * len(equation.outvars)
        for inner in programs_in(equation):
            results = waits_for(inner, before[len(before) - len(inner.invars) :], found)
        known |= zip(equation.outvars, results, strict=True)
    return [known.get(x, nothing) if isinstance(x, Var) else nothing for x in jaxpr.outvars]


@several_devices
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_next_matrices_travel_during_the_work_on_these(kind):
    """They wait until these have arrived, or all would be in memory at once."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(kind,))
    gradients = {"first": (8, 16), "second": (16, 32)}
    specs = {name: NamedSharding(mesh, P("fsdp")) for name in gradients}
    gradients = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=specs[name])
        for name, shape in gradients.items()
    }
    optimizer = lb.orthogonalize_momentum()
    state = jax.eval_shape(optimizer.init, gradients)
    told = {"partition_specs": specs} if kind == AxisType.Auto else {}
    traced = jax.make_jaxpr(lambda g, s: optimizer.update(g, s, **told))(gradients, state)
    found = []
    waits_for(traced.jaxpr, [frozenset()] * len(traced.jaxpr.invars), found)
    there = [x for x in found if "product" not in x]
    assert there == [frozenset(), {"all_to_all"}]
    assert len(found) == 4
