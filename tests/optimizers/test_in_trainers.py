"""The ways in which trainers hold parameters and lay out a state, each a small program.

A trainer does not know what is in a state. It goes by what is around the arrays: names of axes
(Haliax, as in Levanter), metadata (Flax nnx, as in MaxText and Tunix), boxes (Flax linen, as in
nanodo), or patterns over the names of the arrays (big_vision). So whatever stands where a parameter
would stand has to be like it. Every optimizer and every wrapper goes through all of them on a mesh
of 4 x 2 devices, and trains there as on one device.
"""

import dataclasses
import functools
import itertools
import re
from typing import Any

from flax import linen, nnx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import optax_largebatch as lb
from tests.conftest import slow_but
from tests.helpers import mesh_of
from tests.optimizers.registry import OPTIMIZERS, WRAPPERS

pytestmark = [
    pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices"),
    pytest.mark.filterwarnings("ignore:The update works on whole matrices"),
]

# Seven layers, a number that no mesh axis divides.
SHAPES = {
    "embed": {"embedding": (12, 8)},
    "head": {"kernel": (8, 6)},
    "layers": {"down": {"kernel": (7, 16, 8)}, "up": {"bias": (7, 16), "kernel": (7, 8, 16)}},
    "norm": {"scale": (8,)},
}
AXES = {
    "embed": {"embedding": (None, "tensor")},
    "head": {"kernel": ("fsdp", "tensor")},
    "layers": {
        "down": {"kernel": (None, "tensor", "fsdp")},
        "up": {"bias": (None, "tensor"), "kernel": (None, "fsdp", "tensor")},
    },
    "norm": {"scale": ("fsdp",)},
}
STACKED = {"layers/": 0}
STEPS = 3


def is_tuple(node):
    return isinstance(node, tuple)


def network():
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape), "float32"), SHAPES, is_leaf=is_tuple
    )


def gradients_of(arrays, step):
    return jax.tree.map(lambda x: jnp.cos(3 * x + step), arrays)


MESH = {"fsdp": 4, "tensor": 2}


AROUND = WRAPPERS | {
    "accumulate_gradients": lambda inner: lb.accumulate_gradients(
        lb.chain(lb.measure_noise_scale(stacked=STACKED), inner),
        every=2,
        small_batches=True,
        stacked=STACKED,
    ),
    "a clip, and a frozen part": lambda inner: optax.partition(
        {"all": optax.chain(optax.clip_by_global_norm(1.0), inner), "none": optax.set_to_zero()},
        lambda params: jax.tree.map_with_path(
            lambda path, _: "none" if "norm" in jax.tree_util.keystr(path) else "all", params
        ),
    ),
}
INJECTED = ("ns_coeffs", "ns_steps", "radius", "stacked")
RATE = optax.linear_schedule(0.02, 0.0, 2 * STEPS)


def of_registry(name):
    return OPTIMIZERS[name].make(stacked=STACKED, learning_rate=RATE)


MADE = {name: functools.partial(of_registry, name) for name in OPTIMIZERS}
MADE |= {
    "muonh, a head": lambda: lb.muonh(
        RATE, radius="start", adamh_mask=lb.matching("head"), stacked=STACKED
    ),
    "muonh beside adamw": lambda: lb.muonh(RATE, others=optax.adamw(1e-3), stacked=STACKED),
    "muonh, injected": lambda: optax.inject_hyperparams(lb.muonh, static_args=INJECTED)(
        RATE, stacked=STACKED
    ),
}
MADE |= {
    f"{wrapper} of {inner}": lambda wrap=wrap, inner=inner: wrap(of_registry(inner))
    for wrapper, wrap in AROUND.items()
    for inner in ("muonh", "lamb")
}


WITH_COUNTERS_OF_OPTAX = ("muonh beside adamw", "muonh, injected")


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class NamedArray:
    """An array whose axes have names, as in Haliax."""

    array: Any
    axes: tuple[str | None, ...]

    def tree_flatten(self):
        return (self.array,), self.axes

    @classmethod
    def tree_unflatten(cls, axes, arrays):
        return cls(*arrays, axes)


def of_axes(axes):
    return NamedSharding(mesh_of(**MESH), P(*axes))


def by_names_of_axes(tree):
    def sharding(node):
        return of_axes(node.axes if isinstance(node, NamedArray) else ())

    return jax.tree.map(sharding, tree, is_leaf=lambda x: isinstance(x, NamedArray))


PATTERNS = {
    "/".join(key.key for key in path): axes
    for path, axes in jax.tree.leaves_with_path(AXES, is_leaf=is_tuple)
}


def by_patterns(tree):
    """By the names of arrays alone, wherever they are in the state."""

    def sharding(path, _):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        found = [axes for pattern, axes in PATTERNS.items() if re.search(f"{pattern}$", name)]
        return of_axes(found[0] if found else ())

    return jax.tree.map_with_path(sharding, tree)


def boxed(box):
    return lambda arrays: jax.tree.map(box, arrays, AXES)


WAYS = {
    "names of axes": (boxed(NamedArray), by_names_of_axes),
    "boxes of linen": (
        boxed(lambda x, axes: linen.Partitioned(x, names=axes)),
        lambda tree: linen.get_sharding(tree, mesh_of(**MESH)),
    ),
    "patterns": (lambda arrays: arrays, by_patterns),
}
"""Ways to hold parameters, and to lay out whatever stands around them."""
QUICK = {(name, "names of axes") for name in MADE} | {("muonh, a head", way) for way in WAYS}
CASES = slow_but(QUICK, itertools.product(MADE, WAYS))


def first(optimizer, hold):
    params = hold(network())
    return params, optimizer.init(params)


def step(optimizer, params, state, number):
    gradients = gradients_of(params, number)
    with jax.numpy_dtype_promotion("standard"):  # for links of optax
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state


@functools.cache
def on_one_device(name):
    optimizer = MADE[name]()
    params, state = first(optimizer, lambda arrays: arrays)
    run = jax.jit(functools.partial(step, optimizer))
    for number in range(2 * STEPS):
        params, state = run(params, state, jnp.float32(number))
    return jax.device_get(params)


def assert_trained(name, params):
    """The numbers of one device, for what a framework has around them."""
    columns = zip(*map(jax.tree.leaves, (params, on_one_device(name))), strict=True)
    for found, wanted in columns:
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_state_is_laid_out_by_what_is_around_the_parameters(case):
    """A sharding that does not fit an array is an error here, as it is in the trainer."""
    name, way = case
    hold, layout = WAYS[way]
    tree = jax.eval_shape(lambda: first(MADE[name](), hold))
    # jax.tree.broadcast is new in jax 0.8.
    shardings = jax.tree.map(
        lambda one, part: jax.tree.map(lambda _: one, part), layout(tree), tree
    )
    for sharding, leaf in zip(*map(jax.tree.leaves, (shardings, tree)), strict=True):
        sharding.shard_shape(leaf.shape)
    moments = [x for x in jax.tree.leaves(shardings[1]) if any(x.spec)]
    assert len(moments) >= len(jax.tree.leaves(SHAPES, is_leaf=is_tuple)) - 1


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MADE)
def test_trains_as_on_one_device(name, way):
    optimizer = MADE[name]()
    hold, layout = WAYS[way]
    start = lambda: first(optimizer, hold)  # noqa: E731
    shardings = layout(jax.eval_shape(start))
    carry = jax.jit(start, out_shardings=shardings)()
    run = jax.jit(functools.partial(step, optimizer), out_shardings=shardings)
    for number in range(2 * STEPS):
        carry = run(*carry, jnp.float32(number))
    assert_trained(name, carry[0])
    assert float(lb.step_metrics(carry[1])["learning_rate"]) > 0


class Net(nnx.Module):
    """The network, with metadata that says how each parameter is split."""

    def __init__(self, arrays, axes):
        for name, own in arrays.items():
            if isinstance(own, dict):
                setattr(self, name, Net(own, axes[name]))
            else:
                made = nnx.with_partitioning(lambda own=own: own, axes[name])()
                setattr(self, name, nnx.Param(made))


def model_and_optimizer(name):
    model = Net(network(), AXES)
    return model, nnx.Optimizer(model, MADE[name](), wrt=nnx.Param)


# optax.partition leaves the box of a parameter that it hides (flax#4901).
ON_SHAPES = [name for name in MADE if not name.startswith("a clip, and a frozen part")]


needs_set_mesh = pytest.mark.skipif(
    not hasattr(jax, "set_mesh"), reason="jax.set_mesh, which Flax's guide begins with, is newer"
)


@needs_set_mesh
@pytest.mark.parametrize("name", ON_SHAPES)
def test_nnx_lays_out_a_state_that_is_not_there_yet(name):
    """As a sharded run begins in the guide of Flax: shapes first, then each device its part."""
    with jax.set_mesh(mesh_of(**MESH)):
        _, state = nnx.split(nnx.eval_shape(lambda: model_and_optimizer(name)))
    shardings = jax.tree.leaves(nnx.get_named_sharding(state, mesh_of(**MESH)))
    for sharding, leaf in zip(shardings, jax.tree.leaves(state), strict=True):
        sharding.shard_shape(leaf.shape)
    moments = [x for x in shardings if any(x.spec)]
    assert len(moments) >= 2 * len(jax.tree.leaves(SHAPES, is_leaf=is_tuple)) - 1


@pytest.mark.parametrize("name", [name for name in MADE if name not in WITH_COUNTERS_OF_OPTAX])
def test_an_eager_state_is_restored_to_where_it_was(name):
    """A counter on one device, restored there, could not go into a step with the rest."""
    shardings = by_patterns(network())
    params = jax.device_put(network(), shardings)
    state = MADE[name]().init(params)
    mesh = mesh_of(**MESH)
    for path, leaf in jax.tree.leaves_with_path(state):
        assert set(leaf.devices()) == set(mesh.devices.flat), path
