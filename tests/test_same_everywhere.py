"""The same numbers however layers are stacked and wherever the step runs.

Every optimizer trains one network in which layers stand apart and stacked on axis 0, on axis 1 and
on two axes, on every kind of mesh; and is compared with a float64 run on one device in which every
layer is a leaf of its own.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
from numpy.testing import assert_allclose
import optax
import pytest

import optax_largebatch as lb
from optax_largebatch.engine import execution_plans
from tests import helpers
from tests.conftest import enable_x64
from tests.helpers import mesh_of, shapes_on, shardings_on
from tests.optimizers.registry import OPTIMIZERS

pytestmark = pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="jax.shard_map is jax 0.7")

STEPS = 20
SHAPES = {
    "bias": (16,),
    "biases": (3, 16),
    "experts": (2, 3, 8, 16),
    "kernel": (8, 16),
    "kernels": (3, 8, 16),
    "kernels_inside": (8, 3, 16),
    "number": (),
    "numbers": (8,),
    "pipeline": (8, 4, 16),
}
STACKED = {
    "^biases": 0,
    "^experts": (0, 1),
    "^kernels$": 0,
    "^kernels_inside": 1,
    "^numbers": 0,
    "^pipeline": 0,
}
FSDP = {
    "bias": P(),
    "biases": P(None, "fsdp"),
    "experts": P(None, None, "fsdp"),
    "kernel": P("fsdp"),
    "kernels": P(None, "fsdp"),
    "kernels_inside": P("fsdp"),
    "number": P(),
    "numbers": P("fsdp"),
    "pipeline": P("fsdp"),
}
FSDP_AND_TENSOR = {
    "bias": P("tensor"),
    "biases": P(),
    "experts": P(None, None, "fsdp"),
    "kernel": P("fsdp", "tensor"),
    "kernels": P(None, "fsdp", "tensor"),
    "kernels_inside": P("tensor", None, "fsdp"),
    "number": P(),
    "numbers": P("tensor"),
    "pipeline": P("fsdp", None, "tensor"),
}
# Of leaves that are alike some ways put several together. The number of a block that is a single
# element has the shape of the block.
ALIKE = ("bias", "biases", "kernel", "number", "numbers", "pipeline")
TWINS = {f"{name}_too": name for name in ALIKE}
for values in (SHAPES, FSDP, FSDP_AND_TENSOR):
    values.update({twin: values[name] for twin, name in TWINS.items()})


@pytest.fixture(autouse=True)
def nothing_read_back():
    """No program of this file goes into the cache of compiled programs.

    jaxlib runs a program that it read back with its sums over devices in any order (CPU, jax 0.10):
    one with many of them, as Cain's, stops for ever or crashes.
    """
    usual = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", float("inf"))
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", usual)


def network():
    """Layers whose weights differ in size by a hundred."""
    rng = np.random.default_rng(0)
    params = {}
    for name, shape in SHAPES.items():
        scale = rng.choice([0.1, 1.0, 3.0, 10.0], [*shape[:2], *[1] * (len(shape) - 2)])
        params[name] = (scale * rng.normal(size=shape)).astype("float32")
    return params


def axes_of(name):
    name = TWINS.get(name, name)
    axes = STACKED.get(f"^{name}", STACKED.get(f"^{name}$", ()))
    return axes if isinstance(axes, tuple) else (axes,)


def apart(params):
    """The network with a leaf for each layer."""
    layers = {}
    for name, leaf in params.items():
        axes = axes_of(name)
        for layer in itertools.product(*(range(leaf.shape[axis]) for axis in axes)):
            index = [slice(None)] * leaf.ndim
            for axis, number in zip(axes, layer, strict=True):
                index[axis] = number
            layers[f"{name}{layer}"] = leaf[tuple(index)]
    return layers


def optimizer_of(name, stacked):
    """The optimizer with a rule that looks at shapes, and then a clip that is always active.

    The clip shows sums that are too large by a factor, to which a trust ratio is blind.
    """
    entry = OPTIMIZERS[name]
    masks = entry.known(weight_decay_mask=lb.at_least_ndim(2))
    return lb.chain(entry.make(stacked=stacked, **masks), lb.clip_by_global_norm(0.1))


def gradients_at(params, index):
    return jax.tree.map(lambda x: 0.3 * x + 0.2 * jnp.cos(3 * x + index), params)


def trained(optimizer, params, state, **extra_args):
    indices = jnp.arange(STEPS, dtype=jax.tree.leaves(params)[0].dtype)
    return helpers.trained(optimizer, params, gradients_at, indices, state, **extra_args)[0]


@functools.cache
def expected(name):
    """Layers apart, one device, float64."""
    with enable_x64(True):
        layers = {name: jnp.asarray(x, "float64") for name, x in apart(network()).items()}
        optimizer = optimizer_of(name, stacked=None)
        params, state = jax.jit(functools.partial(trained, optimizer))(
            layers, optimizer.init(layers)
        )
        return jax.device_get(params), ratios(state)


def ratios(state):
    """The trust ratios of all layers, from each of the vectors in the state."""
    return [np.asarray(x) for _, x in optax.tree.get_all_with_path(state, "trust_ratios")]


def on_one_device(optimizer, params):
    return jax.jit(functools.partial(trained, optimizer))(params, optimizer.init(params))


def on_a_mesh(
    optimizer, params, mesh=None, specs=FSDP, zero=None, partition_specs=None, state=None
):
    """Under jit; the compiler sees to the communication, unless the step is told the specs."""
    mesh = mesh or mesh_of(fsdp=8)
    with jax.set_mesh(mesh):
        shardings = shardings_on(mesh, specs)
        params = jax.device_put(params, shardings)
        state_shardings = lb.optimizer_state_shardings(optimizer, params, mesh, axis=zero)
        init = jax.jit(optimizer.init, out_shardings=state_shardings)
        state = init(params) if state is None else jax.device_put(state, state_shardings)
        step = jax.jit(
            functools.partial(trained, optimizer, partition_specs=partition_specs),
            out_shardings=(shardings, state_shardings),
        )
        return step(params, state)


def in_shard_map(optimizer, params, mesh=None, specs=FSDP, check_vma=True):
    mesh = mesh or mesh_of(fsdp=8)
    like = shapes_on(params, shardings_on(mesh, specs))
    shardings = lb.optimizer_state_shardings(optimizer, like, mesh)
    state_specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
    step = jax.shard_map(
        functools.partial(trained, optimizer, partition_specs=specs),
        mesh=mesh,
        in_specs=(specs, state_specs),
        out_specs=(specs, state_specs),
        check_vma=check_vma,
    )
    return jax.jit(step)(params, optimizer.init(params))


def in_pmap(optimizer, params, specs=FSDP):
    """Parameters split by hand, with a first axis for the devices."""
    mesh = mesh_of(fsdp=8)
    param_shardings = shardings_on(mesh, specs)
    like = shapes_on(params, param_shardings)
    shardings = lb.optimizer_state_shardings(optimizer, like, mesh)

    def split(x, sharding):
        spec = tuple(sharding.spec)
        parts = np.split(np.asarray(x), 8, spec.index("fsdp")) if "fsdp" in spec else [x] * 8
        return np.stack(parts)

    def join(x, sharding):
        spec = tuple(sharding.spec)
        return np.concatenate(list(x), spec.index("fsdp")) if "fsdp" in spec else x[0]

    step = jax.pmap(functools.partial(trained, optimizer, partition_specs=specs), axis_name="fsdp")
    params, state = step(
        jax.tree.map(split, params, param_shardings),
        jax.tree.map(split, optimizer.init(params), shardings),
    )
    return jax.tree.map(join, params, param_shardings), jax.tree.map(join, state, shardings)


def on_two_axes(kind=AxisType.Explicit):
    return {"mesh": mesh_of(kind, fsdp=4, tensor=2), "specs": FSDP_AND_TENSOR}


def split_state():
    """ZeRO stage 1: parameters whole, moments split."""
    return {"specs": dict.fromkeys(SHAPES, P()), "zero": "fsdp"}


# How the step runs, and what that is given.
WAYS = {
    "one device": (on_one_device, dict),
    "automatic mesh": (on_a_mesh, dict),
    "explicit mesh": (on_a_mesh, lambda: {"mesh": mesh_of(AxisType.Explicit, fsdp=8)}),
    "explicit mesh of two axes": (on_a_mesh, on_two_axes),
    "split state": (on_a_mesh, split_state),
    "mesh, with specs": (on_a_mesh, lambda: {"partition_specs": FSDP}),
    "explicit mesh, with specs": (
        on_a_mesh,
        lambda: on_two_axes() | {"partition_specs": FSDP_AND_TENSOR},
    ),
    "split state, with specs": (on_a_mesh, lambda: split_state() | {"partition_specs": FSDP}),
    "shard_map": (in_shard_map, dict),
    "unchecked shard_map": (in_shard_map, lambda: {"check_vma": False}),
    "shard_map of two axes": (in_shard_map, lambda: on_two_axes(AxisType.Auto)),
    "pmap": (in_pmap, dict),
}


HARDEST = ("explicit mesh of two axes", "split state, with specs", "shard_map of two axes")
USUAL = {("lamb", way) for way in ("one device", "pmap", *HARDEST)}
"""Those whose failure one of these would share are slow."""
TYPED = ("explicit mesh", "explicit mesh of two axes", "shard_map", "shard_map of two axes", "pmap")
"""The ways whose types say how leaves are split: there GPUs have plans of their own."""
USUAL_ON_GPUS = {("lans", "explicit mesh of two axes"), ("lans", "shard_map of two axes")}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(*case, marks=() if case in USUAL else pytest.mark.slow)
        for case in itertools.product(OPTIMIZERS, WAYS)
    ],
)
def test_equals_layers_apart_on_one_device(name, way):
    check(name, way)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(*case, marks=() if case in USUAL_ON_GPUS else pytest.mark.slow)
        for case in itertools.product(OPTIMIZERS, TYPED)
    ],
)
def test_equals_layers_apart_as_on_several_gpus(name, way, monkeypatch):
    on_cpus = {("cpu", kind): plan for (_, kind), plan in execution_plans.ON_A_MESH.items()}
    monkeypatch.setattr(execution_plans, "ON_A_MESH", on_cpus)
    check(name, way)


def check(name, way):
    layers, layer_ratios = expected(name)
    optimizer = optimizer_of(name, lb.stacked_layers(STACKED))
    with enable_x64(True):
        params = {name: jnp.asarray(x, "float64") for name, x in network().items()}
        run, settings = WAYS[way]
        params, state = jax.device_get(run(optimizer, params, **settings()))
    got, got_ratios = apart(params), ratios(state)
    for layer, value in layers.items():
        scale = np.abs(value).max()
        assert_allclose(got[layer], value, rtol=0, atol=1e-10 * scale)
    for vector, expected_vector in zip(got_ratios, layer_ratios, strict=True):
        assert_allclose(vector, expected_vector, rtol=1e-5)
