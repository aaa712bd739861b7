"""Passes give the numbers of the reference executor, and leave nothing behind."""

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import optax_largebatch as lb
from optax_largebatch.engine import compilation, identical_leaves, sums, tiles
from optax_largebatch.engine.execution_plans import ONE_CPU, ONE_GPU, ONE_TPU, SEVERAL_DEVICES
from optax_largebatch.engine.to_optax import transformation
from optax_largebatch.testing import reference
from tests.conftest import slow_but
from tests.engine.steps import compiled_step, large_kernels, on_shards, some_steps, use_plan
from tests.helpers import mesh_of
from tests.optimizers.registry import LONG, named

KERNELS = lb.matching("kernel")
GROUPS = lb.param_groups({"params": lb.matching("conv"), "weight_decay": 0.5})
OPTIMIZERS = {
    "lamb": lambda: lb.lamb(0.1, weight_decay=0.1, trust_ratio_mask=KERNELS),
    "lamb, clipped": lambda: lb.lamb(0.1, weight_decay=0.1, max_grad_norm=0.5, groups=GROUPS),
    "lamb, stacked": lambda: lb.lamb(0.1, stacked=lb.stacked_layers({"conv": (0, 1)})),
    "lans, stacked": lambda: lb.lans(
        0.1, weight_decay=0.5, stacked=lb.stacked_layers({"conv": 0, "kernel": 1})
    ),
    "lamb, a bfloat16 moment": lambda: lb.lamb(0.1, mu_dtype="bfloat16"),
    "lamb, centralized": lambda: lb.chain(lb.centralize_gradients(KERNELS), lb.lamb(0.1)),
    "lans": lambda: lb.lans(0.1, weight_decay=0.1, trust_ratio_mask=KERNELS),
    "lans, sequential": lambda: lb.lans(0.1, weight_decay=0.1, order="sequential"),
    "lars": lambda: lb.lars(0.1, 0.1, KERNELS, nesterov=True),
    "lars, update": lambda: lb.lars(
        0.1, 0.1, denominator="update", learning_rate_in_momentum=False
    ),
    "larc": lambda: lb.larc(0.1, weight_decay=0.1, groups=GROUPS),
    "eve": lambda: lb.eve(0.1),
    "cain": lambda: lb.cain(0.1),
    "learned_gradient": lambda: lb.learned_gradient(0.1, lr_est_period=1),
    "scaled_adam": lambda: lb.scaled_adam(0.1, clipping_scale=1.0),
    "two rounds and two clips": lambda: lb.chain(
        lb.scale_by_trust_ratio(trust_ratio_mask=KERNELS),
        lb.clip_by_global_norm(0.5),
        lb.nesterov_split(lb.chain(lb.accumulate_momentum(0.5), lb.scale_by_trust_ratio())),
        lb.accumulate_momentum(0.9),
        lb.clip_by_global_norm(0.25),
    ),
    "a global norm in a branch": lambda: lb.nesterov_split(
        lb.chain(lb.clip_by_global_norm(0.1), lb.scale_by_trust_ratio())
    ),
}
# More identical leaves than a chunk or a batch has, and some that are too large for a batch.
PARAMS = {
    "dense": {"kernel": jnp.arange(1.0, 7.0).reshape(2, 3), "bias": jnp.zeros(3)},
    "dense_too": {"kernel": jnp.arange(-3.0, 3.0).reshape(2, 3), "bias": jnp.ones(3)},
    "dense_more": {"kernel": jnp.arange(2.0, 8.0).reshape(2, 3), "bias": jnp.arange(3.0)},
    "conv": jnp.linspace(-1.0, 1.0, 24).reshape(2, 3, 2, 2),
    "conv_too": jnp.linspace(2.0, 1.0, 24).reshape(2, 3, 2, 2),
    "gain": jnp.asarray(2.0),
}


@pytest.fixture(params=["few cores", "many cores"])
def cores(request, monkeypatch):
    monkeypatch.setattr(sums, "has_few_cores", lambda: request.param == "few cores")
    return request.param


ACCELERATORS = {"several devices": SEVERAL_DEVICES, "one GPU": ONE_GPU, "one TPU": ONE_TPU}
WAYS = [*ACCELERATORS, "few", "small leaves", "tiles", "many cores"]


@pytest.fixture
def way(request, monkeypatch):
    """The ways in which passes run: what they do depends on the device and on sizes."""
    plan = ACCELERATORS.get(request.param, ONE_CPU)
    size = plan.group_size
    use_plan(monkeypatch, dataclasses.replace(plan, group_size=size and size * 10 // 2**18))
    monkeypatch.setattr(compilation, "MAX_CHUNK", 2)
    monkeypatch.setattr(identical_leaves, "MAX_BATCHED_LEAF", 20)
    monkeypatch.setattr(identical_leaves, "MAX_KERNEL_ARRAYS", 14)
    monkeypatch.setattr(sums, "has_few_cores", lambda: request.param == "tiles")
    if request.param != "few":
        monkeypatch.setattr(sums, "MIN_YNN_SIZE", 4)
    if request.param in ("tiles", "many cores"):
        monkeypatch.setattr(sums, "LARGE", 5)
        monkeypatch.setattr(sums, "LARGE_ON_FEW_CORES", 5)
        monkeypatch.setattr(tiles, "MAX_TILE_ELEMENTS", 5)
        monkeypatch.setattr(tiles, "TILES_PER_ITERATION", 1)
        monkeypatch.setattr(tiles, "ALIGNMENT", 1)


UNLIKE = ("lans, stacked", "two rounds and two clips")
"""Their rounds are unlike; the program of any other is like that of one of them."""


def marks_of(name, way):
    """Of the others one way is among the fast tests, where leaves are cut."""
    fast = name in UNLIKE or (way == "tiles" and name not in LONG)
    return () if fast else pytest.mark.slow


CASES = [pytest.param(name, way, marks=marks_of(name, way)) for name in OPTIMIZERS for way in WAYS]


def four_steps(optimizer, update):
    waves = lambda index: jax.tree.map(lambda x: jnp.cos(3 * x + index), PARAMS)  # noqa: E731
    return some_steps(optimizer, update, PARAMS, waves, 4)


@functools.cache
def of_the_reference_executor(name):
    """Compiled once for all ways, of which it knows nothing."""
    optimizer = OPTIMIZERS[name]()
    return [*four_steps(optimizer, reference(optimizer).update)]


@pytest.mark.parametrize(("name", "way"), CASES, indirect=["way"])
@pytest.mark.usefixtures("way")
def test_equals_the_reference_executor(name):
    optimizer = OPTIMIZERS[name]()
    expected = of_the_reference_executor(name)
    for found, wanted in zip(four_steps(optimizer, optimizer.update), expected, strict=True):
        chex.assert_trees_all_close(found, wanted, rtol=6e-6, atol=5e-7)


# One element below each threshold, at it and above it, as it is measured; and two stacks.
SIZES = [
    size + more
    for size in (sums.MIN_YNN_SIZE, sums.LARGE, sums.LARGE_ON_FEW_CORES)
    for more in (-1, 0, 1)
]


@functools.cache
def at_every_threshold(name):
    """An optimizer, parameters, gradients, and the reference's second step for any cores."""
    stacked = lb.stacked_layers({"^stack": 0})
    optimizer = getattr(lb, name)(0.1, stacked=stacked)
    shapes = {f"leaf_{size}": (size,) for size in SIZES}
    shapes |= {"stack": (3, 128, 96), "stack_of_large": (2, 1024, 640)}
    params = {
        key: jnp.cos(jnp.arange(np.prod(shape), dtype="float32")).reshape(shape) + 0.5
        for key, shape in shapes.items()
    }
    gradients = jax.tree.map(lambda x: jnp.sin(3 * x) + 0.1, params)
    expected = second_step(optimizer, reference(optimizer).update, params, gradients)
    return optimizer, params, gradients, expected


def second_step(optimizer, update, params, gradients):
    step = jax.jit(update)
    _, state = step(gradients, optimizer.init(params), params)
    return step(gradients, state, params)


@pytest.mark.parametrize("name", slow_but(("lamb",), ["lamb", "lans", "lars", "eve"]))
@pytest.mark.usefixtures("cores")
def test_at_every_threshold(name):
    optimizer, params, gradients, expected = at_every_threshold(name)
    found = second_step(optimizer, optimizer.update, params, gradients)
    chex.assert_trees_all_close(found, expected, rtol=2e-5, atol=1e-7)


LARGE = large_kernels(8)
BYTES = 8 * 4 * 2048 * 2048


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="older XLA keeps a leaf, and more bytes")
@pytest.mark.parametrize(
    ("name", "buffers", "passes_at_all", "outside_of_loops"),
    [("lamb", 3, 56, 41), ("lans", 3, 76, 50), ("lars", 2, 36, 36)],
)
def test_what_a_compiled_step_keeps_and_moves(
    name, buffers, passes_at_all, outside_of_loops, cores
):
    """Temporaries are a hundredth of the parameters; one leaf's direction would be an eighth.

    The bytes are those for each float32 parameter, added over all passes; one more pass would read
    8 more. Of a loop over tiles XLA counts one turn. `jnp.where` is a jitted function: each would
    be a call, and no part of a kernel, if a pass were not merged inside.
    """
    step = compiled_step(getattr(lb, name)(1e-3, weight_decay=0.01), LARGE)
    memory = step.memory_analysis()
    assert memory.temp_size_in_bytes <= 0.01 * BYTES
    assert memory.alias_size_in_bytes >= buffers * BYTES
    most = outside_of_loops if cores == "few cores" else passes_at_all
    assert step.cost_analysis()["bytes accessed"] / (BYTES / 4) <= most + 0.5
    calls = re.findall(r" call\(.*to_apply=%?(\w+)", step.as_text())
    assert calls
    assert not [name for name in calls if "where" in name]


def test_leaves_of_one_signature_are_traced_once():
    traced = []

    def noting(update, at):
        traced.append(update.shape)
        return update, at.state

    optimizer = transformation(noting)
    params = {f"leaf_{index}": jnp.ones((2, 3)) for index in range(20)} | {"other": jnp.ones(3)}
    jax.jit(optimizer.update)(params, optimizer.init(params), params)
    # Once to see what it asks for, and once for its only pass.
    assert sorted(traced) == [(2, 3), (2, 3), (3,), (3,)]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", named(["lamb", "scaled_adam"]))
def test_a_norm_of_leaves_of_two_precisions(name):
    """The sum over all leaves is of the widest of them, and each leaf has it in its own."""
    more = {"max_grad_norm": 0.1} if name == "lamb" else {"clipping_scale": 1.0}
    optimizer = getattr(lb, name)(0.1, **more)
    params = {"wide": jnp.linspace(1.0, 2.0, 5), "narrow": jnp.linspace(1, 3, 4, dtype="float32")}
    gradients = jax.tree.map(jnp.cos, params)
    (updates, _), (expected, _) = (
        second_step(optimizer, update, params, gradients)
        for update in (optimizer.update, reference(optimizer).update)
    )
    chex.assert_trees_all_close(updates, expected, rtol=1e-6)
    assert [x.dtype for x in jax.tree.leaves(updates)] == ["float32", "float64"]


def test_operations_are_named_after_their_link():
    """As a profile shows them; the list of all links in each name would be compiled for long."""
    optimizer = lb.lamb(0.1)
    params = {"kernel": jnp.ones((3, 4))}
    program = jax.jit(optimizer.update).lower(params, optimizer.init(params), params).compile()
    assert "/chain/scale_by_trust_ratio/" in program.as_text()
    assert "chain(" not in program.as_text()


@pytest.mark.parametrize("specs_known", [False, pytest.param(True, marks=on_shards)])
def test_numbers_that_are_known_already_are_one_constant(specs_known):
    """XLA would take long to put a thousand of them together, and on a mesh send them around."""
    transform = lb.scale_by_learning_rate(0.1)
    params = {f"bias_{index}": jnp.ones(8 * index + 8) for index in range(5)}
    specs = {}
    if specs_known:
        mesh = mesh_of(data=8)
        params = jax.device_put(params, NamedSharding(mesh, P("data")))
        specs = {"partition_specs": jax.tree.map(lambda x: x.sharding, params)}
    update = jax.jit(functools.partial(transform.update, **specs))
    assert "concatenate" not in update.lower(params, transform.init(params)).as_text()
    _, state = update(params, transform.init(params))
    chex.assert_trees_all_close(state.learning_rates, jnp.full(5, 0.1))
