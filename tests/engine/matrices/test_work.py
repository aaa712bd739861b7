"""The order in which devices exchange matrices and work on them."""

from collections.abc import Iterator
import re

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Var
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import optax_largebatch as lb
from tests.engine.steps import on_shards, since_types_know_meshes
from tests.helpers import mesh_of


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


@on_shards
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_next_matrices_travel_during_the_work_on_these(kind):
    """They wait until these have arrived, or all would be in memory at once."""
    mesh = mesh_of(kind, fsdp=8)
    split = NamedSharding(mesh, P("fsdp"))
    gradients = [
        jax.ShapeDtypeStruct(shape, "float32", sharding=split) for shape in ((8, 16), (16, 32))
    ]
    optimizer = lb.orthogonalize_momentum()
    state = jax.eval_shape(optimizer.init, gradients)
    told = {"partition_specs": split} if kind == AxisType.Auto else {}
    traced = jax.make_jaxpr(lambda g, s: optimizer.update(g, s, **told))(gradients, state)
    found = []
    waits_for(traced.jaxpr, [frozenset()] * len(traced.jaxpr.invars), found)
    there = [x for x in found if "product" not in x]
    assert there == [frozenset(), {"all_to_all"}]
    assert len(found) == 4


@on_shards
@since_types_know_meshes
@pytest.mark.filterwarnings("ignore:The update works on whole matrices")
@pytest.mark.parametrize(
    ("axes", "shape", "spec"),
    [
        ({"fsdp": 4, "tensor": 2}, (16, 32, 64), P(None, "fsdp", "tensor")),
        ({"fsdp": 4, "tensor": 2}, (16, 32, 64), P(None, "tensor", "fsdp")),
        ({"expert": 2, "data": 2, "model": 2}, (4, 4, 32, 64), P(None, "expert", "data", "model")),
    ],
)
def test_the_compiler_gathers_no_matrix_that_is_split_along_both_axes(axes, shape, spec):
    """Nobody tells the step how the stack is split."""
    mesh = mesh_of(**axes)
    stacked = lb.stacked_layers({"kernel": tuple(range(len(shape) - 2))})
    optimizer = lb.orthogonalize_momentum(stacked=stacked)
    whole = {"kernel": jax.random.normal(jax.random.key(0), shape)}
    split = NamedSharding(mesh, spec)
    state = optimizer.init(whole)

    def step(gradients, state):
        return optimizer.update(gradients, state)[0]

    gradients, momentum = jax.device_put((whole, state.mu), split)
    arguments = gradients, state._replace(mu=momentum)
    compiled = jax.jit(step, out_shardings=split).lower(*arguments).compile()
    assert set(re.findall(r" (all-[\w-]+)\(", compiled.as_text())) == {"all-to-all"}
    alone = jax.jit(step)(whole, state)["kernel"]
    np.testing.assert_allclose(compiled(*arguments)["kernel"], alone, rtol=1e-4, atol=1e-5)
