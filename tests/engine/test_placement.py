"""Where a step runs is decided by the step: by the types of its arrays and when it is lowered."""

from collections import Counter
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import optax_largebatch as lb
from optax_largebatch.engine import execution_plans, transformation
from optax_largebatch.engine.execution_plans import ONE_CPU
from tests.conftest import slow_but
from tests.engine.steps import (
    compiled_step,
    large_kernels,
    lowered,
    several_devices,
    since_types_know_meshes,
    step_of,
)
from tests.helpers import first_step, mesh_of

PLATFORMS = ("cpu", "cuda", "tpu")


def functions_in(module):
    """The body of each function of a module, by name."""
    found = re.split(r"\n  func\.func ", module)[1:]
    return {re.search(r"@([\w.]+)", text)[1]: text.split("\n", 1)[1] for text in found}


def operations(body, functions):
    """How often each operation stands in some lines and in the functions that they call."""
    lines = [line for line in body.splitlines() if " = " in line or "call @" in line]
    count = Counter()
    for line in lines:
        name = re.search(r"(?:= |^\s*)\"?((?:stablehlo|func)[\w.]*|call)", line)
        called = re.search(r"call @([\w.]+)", line)
        if called:
            outlined = "outlined " if "inlineable" in line else ""
            count[f"{outlined}call"] += 1
            count += operations(functions[called[1]], functions)
        elif name and name[1] not in ("stablehlo.case", "stablehlo.constant"):
            count[name[1]] += 1
    return count


def branches_in(body):
    """The branches of the last choice in a function, and what stands around its choices."""
    regions = re.split(r"stablehlo\.case", body)
    own = regions[-1].split("\n    }, {\n")
    own[-1], after = own[-1].split("\n    }) :", 1)
    return own, regions[0] + after


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="as modules are written today")
@pytest.mark.parametrize("name", slow_but(("lamb",), ["lamb", "lans", "lars"]))
def test_a_module_for_three_platforms_has_the_program_of_each(name):
    """A program that is exported at once for several has what each alone would have."""
    optimizer = getattr(lb, name)(1e-3, weight_decay=0.01)
    params = {"kernel": jax.ShapeDtypeStruct((512, 2048), "float32")}
    params["bias"] = jax.ShapeDtypeStruct((3000,), "float32")
    arguments = (params, jax.eval_shape(optimizer.init, params), params)

    def exported(*platforms):
        step = jax.jit(step_of(optimizer))
        return jax.export.export(step, platforms=platforms)(*arguments).mlir_module()

    together = functions_in(exported(*PLATFORMS))
    branches, around = branches_in(together["main"])
    assert len(branches) == len(PLATFORMS)
    alone = {}
    for platform in PLATFORMS:
        own = functions_in(exported(platform))
        alone[platform] = operations(own["main"], own)
        branch = branches[PLATFORMS.index(platform)]
        of_both = operations(branch, together) + operations(around, together)
        assert of_both == alone[platform]
    assert alone["cuda"] != alone["tpu"] != alone["cpu"]
    assert alone["cpu"]["outlined call"] > 0 == alone["tpu"]["outlined call"]


@several_devices
@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="older XLA keeps one leaf")
def test_one_of_eight_devices_has_the_program_of_one():
    one = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    program = compiled_step(lb.lans(1e-3, weight_decay=0.01), large_kernels(4, one))
    assert program.memory_analysis().temp_size_in_bytes < 0.01 * 4 * 4 * 2048 * 2048
    assert re.search(r" call\(.*inlineable=.?\"false", program.as_text())


@several_devices
@pytest.mark.parametrize("said_by", ["types", "in_shardings", "a constraint inside"])
def test_several_devices_share_the_leaves(said_by):
    """However they are said to be several, nothing is gathered and no loop runs over tiles."""
    split = NamedSharding(mesh_of(data=8), P("data"))
    optimizer = lb.scale_by_trust_ratio()
    params = {f"kernel_{index}": jnp.ones((1024, 1024)) for index in range(3)}
    state = optimizer.init(params)

    def step(gradients, state, params):
        if said_by == "a constraint inside":
            gradients, params = jax.lax.with_sharding_constraint((gradients, params), split)
        return optimizer.update(gradients, state, params)

    options = {"in_shardings": (split, None, split)} if said_by == "in_shardings" else {}
    if said_by == "types":
        params = jax.device_put(params, split)
    program = jax.jit(step, **options).lower(params, state, params).compile().as_text()
    reductions = len(re.findall(r" all-reduce(?:-start)?\(", program))
    assert reductions == 1 if jax.__version_info__ >= (0, 8) else reductions  # combined since then
    assert " while(" not in program
    assert " all-gather(" not in program


def test_a_step_is_traced_for_the_place_alone_and_once(monkeypatch):
    seen = []

    def noting(*given):
        seen.append("one CPU")
        return ONE_CPU.sums(*given)

    noting_cpu = dataclasses.replace(ONE_CPU, sums=noting)
    monkeypatch.setitem(execution_plans.ON_ONE_DEVICE, "cpu", noting_cpu)
    optimizer = lb.lamb(1e-3)
    params = {"kernel": jnp.eye(4)}
    lowered(optimizer, params, "tpu")
    assert not seen
    state = optimizer.init(params)
    for _ in range(3):
        _, state = optimizer.update(params, state, params)
    assert len(seen) == 1


def test_a_hyperparameter_that_a_program_closes_over_is_no_constant():
    """It is no argument of the leaf program, so JAX must find it there."""

    def scale(factor):
        return transformation(lambda update, at: (factor * update, at.state))

    optimizer = optax.inject_hyperparams(scale)(factor=2.0)
    state = optimizer.init(jnp.ones(3))
    step = jax.jit(optimizer.update)
    for factor in (2.0, 5.0):
        state.hyperparams["factor"] = jnp.asarray(factor)
        updates, _ = step(jnp.ones(3), state)
        np.testing.assert_array_equal(updates, factor * np.ones(3))


def test_a_step_that_is_run_again_for_its_derivative(x64):
    optimizer = lb.lans(1e-1, weight_decay=0.1)
    params = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)
    state = optimizer.init(params)

    def along(t):
        return optimizer.update(jnp.cos(5 * params) + t * params, state, params)[0][0, 0]

    again = jax.jit(jax.grad(jax.checkpoint(along)))(0.0)
    np.testing.assert_allclose(again, jax.grad(along)(0.0), rtol=1e-5)


@several_devices
@since_types_know_meshes
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("specs_known", [False, True])
def test_the_types_on_a_mesh_say_how_gpus_take_sums(kind, specs_known, monkeypatch):
    """Side by side, unless the compiler alone knows how leaves are split; at once on shards."""
    _as_on_gpus(monkeypatch)
    optimizer = lb.lamb(0.1)
    mesh = mesh_of(kind, fsdp=8)
    split = NamedSharding(mesh, P("fsdp"))
    params = {key: jax.ShapeDtypeStruct((32,), "float32", sharding=split) for key in "abc"}
    extra = {"partition_specs": P("fsdp")} if specs_known else {}
    update = functools.partial(optimizer.update, **extra)
    with jax.set_mesh(mesh):
        state = jax.eval_shape(optimizer.init, params)
        text = jax.jit(update).lower(params, state, params).as_text()
    side_by_side = f"tensor<3x{4 if specs_known else 32}xf32>" in text
    assert side_by_side == (specs_known or kind is AxisType.Explicit)
    at_once = re.search(r"stablehlo\.reduce\([^)]*\), \(", text) is not None
    assert at_once == specs_known


@several_devices
@since_types_know_meshes
def test_sums_at_once_inside_shard_map(monkeypatch):
    """They get the types of sums that differ between devices; and the numbers are the same."""
    optimizer = lb.lans(0.1, weight_decay=0.01)
    params = {key: jnp.arange(1.0, 33.0) * scale for key, scale in (("a", 1), ("b", -2))}
    mesh = mesh_of(fsdp=8)

    def updates(gradients, params):
        return first_step(optimizer, gradients, params)[0]

    expected = jax.jit(updates)(params, params)
    _as_on_gpus(monkeypatch)
    on_shards = jax.jit(jax.shard_map(updates, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp")))
    assert re.search(r"reduce\[[^]]*computation=", str(on_shards.trace(params, params).jaxpr))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5),
        on_shards(params, params),
        expected,
    )


def _as_on_gpus(monkeypatch):
    """Has the types of CPUs on a mesh say what those of GPUs say."""
    on_cpus = {("cpu", kind): plan for (_, kind), plan in execution_plans.ON_A_MESH.items()}
    monkeypatch.setattr(execution_plans, "ON_A_MESH", on_cpus)
