"""Wrappers around wrappers, in any container, anywhere: always the numbers of a float64 formula.

`COMPOSITIONS` says how many are drawn: some in the slow suite, 2,000 at night, where
`FIRST_COMPOSITION`, the number of the first, is another every time. The name of a test says it.
"""

from collections.abc import Callable
import os
import random
from typing import Any, NamedTuple

import equinox as eqx
from flax import nnx
from flax.core import FrozenDict
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import optax_largebatch as lb
from tests import reference
from tests.helpers import mesh_of, shardings_on

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="jax.shard_map is jax 0.7"),
]

FIRST = int(os.environ.get("FIRST_COMPOSITION", "0"))
COMPOSITIONS = int(os.environ.get("COMPOSITIONS", "60"))
STEPS = 6
SHAPES = ((8, 3), (8,), (), (2, 8), ())
SPECS = (P("d"), P("d"), P(), P(None, "d"), P())
RATES = np.linspace(0.05, 0.02, STEPS)
DECAY = 0.1
SCHEDULE = lb.values_schedule(RATES)
MATRICES = lb.at_least_ndim(2)

DECAYED = {"weight_decay": DECAY, "weight_decay_mask": MATRICES}


OPTIMIZERS = {
    "lamb": (lb.lamb, DECAYED | {"trust_ratio_mask": MATRICES}, reference.lamb, {"adapted"}),
    "lans": (lb.lans, DECAYED, reference.lans, set()),
    "lars": (lb.lars, DECAYED | {"trust_coefficient": 0.2}, reference.lars, set()),
    "adamh": (lb.adamh, {}, reference.adamh, {"on_sphere"}),
    "muonh": (lb.muonh, {"ns_coeffs": "standard"}, reference.muonh, {"on_sphere"}),
}
SETTINGS = {"lars": {"eta": 0.2}}
"""What the formula is told besides."""


class Parameters(NamedTuple):
    a: Any
    b: Any
    c: Any
    d: Any
    e: Any


class Module(eqx.Module):
    weight: Any
    biases: tuple[Any, Any]
    activation: Callable = eqx.field(static=True)
    frozen: None
    out: Any
    scale: Any


def names(leaves):
    return dict(zip("abcde", leaves, strict=True))


CONTAINERS = {
    "dict": names,
    "tuple": tuple,
    "list": list,
    "named tuple": lambda leaves: Parameters(*leaves),
    "nested": lambda x: {"m": (x[0], {"b": x[1]}), "n": [x[2]], "o": [*x[3:]]},
    "frozen dict": lambda leaves: FrozenDict(names(leaves)),
    "with None": lambda leaves: names(leaves) | {"aa": None, "f": (None, ())},
    "equinox": lambda x: Module(x[0], (x[1], x[2]), jax.nn.relu, None, x[3], x[4]),
    "nnx": lambda leaves: nnx.State({key: nnx.Param(x) for key, x in names(leaves).items()}),
}
"""Each keeps the order of the leaves."""


class Accumulation:
    """`accumulate_gradients`, told without a state of JAX."""

    def __init__(self, every, inner):
        self.every, self.inner = every, inner
        self.total, self.weight, self.parts = 0.0, 0.0, 0

    def __call__(self, gradients, examples, flush):
        scaled = np.array([examples * g for g in gradients], dtype=object)
        self.total, self.weight, self.parts = (
            self.total + scaled,
            self.weight + examples,
            self.parts + 1,
        )
        if self.parts >= self.every or flush:
            means = [total / self.weight for total in self.total]
            self.total, self.weight, self.parts = 0.0, 0.0, 0
            self.inner(means, 1.0, False)


class Skipping:
    """A wrapper that leaves out what is not finite."""

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, gradients, examples, flush):
        if all(np.isfinite(g).all() for g in gradients):
            self.inner(gradients, examples, flush)


SKIPPING = ("skip_bad_steps", "skip_bad_steps, spikes", "dynamic_loss_scale")
WRAPPERS = {
    "accumulate_gradients of 1": lambda inner: lb.accumulate_gradients(inner, every=1),
    "accumulate_gradients of 2": lambda inner: lb.accumulate_gradients(inner, every=2),
    "accumulate_gradients of 3": lambda inner: lb.accumulate_gradients(inner, every=lambda step: 3),
    "skip_bad_steps": lb.skip_bad_steps,
    "skip_bad_steps, spikes": lambda inner: lb.skip_bad_steps(inner, deviations=50.0),
    "dynamic_loss_scale": lambda inner: lb.dynamic_loss_scale(inner, initial_scale=16.0),
    "master_weights": lb.master_weights,
    "stochastic_rounding": lb.stochastic_rounding,
    "optax.chain": lambda inner: optax.chain(optax.identity(), inner),
    "lb.chain": lambda inner: lb.chain(lb.clip_by_global_norm(None), inner),
}


def accumulates(wrappers):
    return any(name.startswith("accumulate") for name in wrappers)


def composed(name, wrappers):
    """The optimizer; the first wrapper is the innermost."""
    factory, arguments, _, _ = OPTIMIZERS[name]
    optimizer = factory(SCHEDULE, **arguments)
    for wrapper in wrappers:
        optimizer = WRAPPERS[wrapper](optimizer)
    return optimizer


def expected(name, wrappers, weights, micro_batches):
    """The weights in the end, by formulas, from what the wrappers hand to the optimizer."""
    handed = []
    step = lambda gradients, examples, flush: handed.append(gradients)  # noqa: E731
    for wrapper in wrappers:
        if wrapper.startswith("accumulate"):
            step = Accumulation(int(wrapper[-1]), step)
        elif wrapper in SKIPPING:
            step = Skipping(step)
    for gradients, examples, flush in micro_batches:
        step(gradients, examples, flush)
    if not handed:
        return weights
    _, _, family, switches = OPTIMIZERS[name]
    of_leaves = [np.stack(own).astype("float64") for own in zip(*handed, strict=True)]
    result = []
    for weight, own in zip(weights, of_leaves, strict=True):
        matrix = weight.ndim > 1
        known = {"wd": DECAY if matrix else 0.0} | dict.fromkeys(switches, matrix)
        known |= SETTINGS.get(name, {}) | {"lr": RATES[: len(own)]}
        *_, last = family(weight.astype("float64"), own, **known)
        result.append(last)
    return result


def one_step(optimizer, wrappers, partition_specs=None):
    """A step as a function of the carry and of what is different from step to step."""

    def step(carry, given):
        params, state = carry
        gradients, examples, flush = given
        scale = optax.tree.get(state, "loss_scale", jnp.ones([]))
        gradients = jax.tree.map(lambda g: g * scale, gradients)
        extra_args = {"examples": examples, "flush": flush} if accumulates(wrappers) else {}
        updates, state = optimizer.update(
            gradients, state, params, partition_specs=partition_specs, **extra_args
        )
        return optax.apply_updates(params, updates), state

    return step


def stacked(given):
    return jax.tree.map(lambda *parts: jnp.stack(parts), *given)


def scanned(optimizer, step, params, given):
    carry = params, optimizer.init(params)
    return jax.lax.scan(lambda carry, own: (step(carry, own), None), carry, given)[0][0]


def eager(optimizer, wrappers, params, given, specs):
    carry = params, optimizer.init(params)
    for own in given:
        carry = one_step(optimizer, wrappers)(carry, own)
    return carry[0]


def donated(optimizer, wrappers, params, given, specs):
    carry = jax.tree.map(jnp.copy, params), jax.jit(optimizer.init)(params)
    step = jax.jit(one_step(optimizer, wrappers), donate_argnums=0)
    for own in given:
        carry = step(carry, own)
    return carry[0]


def on_a_mesh(kind):
    def run(optimizer, wrappers, params, given, specs):
        mesh = mesh_of(kind, d=8)
        split = shardings_on(mesh, specs)
        params = jax.device_put(params, split)
        given = [(jax.device_put(own[0], split), *own[1:]) for own in given]
        step = one_step(optimizer, wrappers)
        with jax.set_mesh(mesh):
            carry = params, jax.jit(optimizer.init)(params)
            for own in given:
                carry = jax.jit(step)(carry, own)
        return carry[0]

    return run


def in_shard_map(check_vma):
    def run(optimizer, wrappers, params, given, specs):
        mesh = mesh_of(d=8)
        step = one_step(optimizer, wrappers, None if check_vma else specs)
        of_all = jax.tree.map(lambda spec: P(None, *spec), specs)
        sharded = jax.shard_map(
            lambda params, given: scanned(optimizer, step, params, given),
            mesh=mesh,
            in_specs=(specs, (of_all, P(), P())),
            out_specs=specs,
            check_vma=check_vma,
        )
        return jax.jit(sharded)(params, stacked(given))

    return run


def in_pmap(optimizer, wrappers, params, given, specs):
    step = one_step(optimizer, wrappers)
    run = jax.pmap(lambda own: scanned(optimizer, step, *own), axis_name="d")
    copies = jax.tree.map(lambda x: jnp.stack([x] * 8), (params, stacked(given)))
    return jax.tree.map(lambda x: x[3], run(copies))


PLACEMENTS = {
    "eager": eager,
    "donated": donated,
    "auto mesh": on_a_mesh(AxisType.Auto),
    "explicit mesh": on_a_mesh(AxisType.Explicit),
    "shard_map": in_shard_map(True),
    "shard_map, unchecked": in_shard_map(False),
    "pmap": in_pmap,
}


def drawn(seed):
    """The composition of a seed, every part of it uniform and for itself.

    (Hypothesis draws neighbours of what it has drawn: few compositions in many cases.)
    """
    draw = random.Random(seed)
    wrappers = draw.sample(list(WRAPPERS), draw.choice((1, 2, 3, 4)))
    accumulating = [name for name in wrappers if name.startswith("accumulate")]
    for second in accumulating[1:]:  # the extra arguments are for one of them
        wrappers.remove(second)
    may_fail = any(name in SKIPPING for name in wrappers)
    faults = (None, None, np.nan, np.inf) if may_fail else (None,)
    name, placement = draw.choice(list(OPTIMIZERS)), draw.choice(list(PLACEMENTS))
    if name == "muonh" and placement == "shard_map":
        placement = "shard_map, unchecked"  # it has to be told which axis is split
    return {
        "name": name,
        "wrappers": wrappers,
        "container": draw.choice(list(CONTAINERS)),
        "placement": placement,
        "told": [
            (draw.choice(faults), draw.choice((0.5, 1.0, 3.0)), draw.random() < 0.3)
            for _ in range(STEPS)
        ],
    }


def check(seed):
    """A composition gives the numbers of the formula."""
    composition = drawn(seed)
    name, wrappers = composition["name"], composition["wrappers"]
    numbers = np.random.default_rng(seed)

    def arrays():
        return [np.asarray(numbers.normal(size=shape), "float32") for shape in SHAPES]

    weights = arrays()
    wrap = CONTAINERS[composition["container"]]
    micro_batches, given = [], []
    for fault, examples, flush in composition["told"]:
        gradients = arrays()
        if fault is not None:
            gradients[numbers.integers(len(SHAPES))].flat[-1] = fault
        micro_batches.append((gradients, examples, flush))
        placed = wrap([jnp.asarray(g) for g in gradients])
        given.append((placed, jnp.float32(examples), jnp.asarray(flush)))
    params = wrap([jnp.asarray(w) for w in weights])
    result = PLACEMENTS[composition["placement"]](
        composed(name, wrappers), wrappers, params, given, wrap(list(SPECS))
    )
    assert jax.tree.structure(result) == jax.tree.structure(params)
    leaves = zip(
        jax.tree.leaves(result), expected(name, wrappers, weights, micro_batches), strict=True
    )
    for own, weight in leaves:
        tolerance = 2e-4 * max(np.abs(weight).max(), 0.1)
        np.testing.assert_allclose(np.asarray(own), weight, rtol=0, atol=tolerance)
        assert own.dtype == jnp.float32


@pytest.fixture
def programs_are_thrown_away():
    """A process has room for the programs of some 700 compositions: each takes pages of its own."""
    yield
    jax.clear_caches()


@pytest.mark.usefixtures("programs_are_thrown_away")
@pytest.mark.parametrize("first", range(FIRST, FIRST + COMPOSITIONS, 10))
def test_compositions_give_the_numbers_of_the_formulas(first):
    for seed in range(first, min(first + 10, FIRST + COMPOSITIONS)):
        try:
            with jax.numpy_dtype_promotion("standard"):
                check(seed)
        except Exception as error:
            error.add_note(f"composition {seed}: {drawn(seed)}")
            raise
