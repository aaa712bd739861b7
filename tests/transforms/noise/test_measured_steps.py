"""Where not every step is measured, the others count for nothing and read nothing."""

import functools
import re

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import optax_largebatch as lb
from tests.conftest import as_users_have_it
from tests.helpers import mesh_of
from tests.transforms.noise.quadratic import examples, needs_shard_map, network

WATCH = lb.measure_noise_scale()
KEYS = jax.random.split(jax.random.key(0), 7)


def one_step(state, key, n):
    """Of two examples each; the steps 0, 3, 6 and so on are measured."""
    own = examples(key, 2)
    mean = jax.tree.map(lambda x: x.mean(0), own)
    parts = lb.small_batches_of_examples(own, network(), mean=mean, when=n % 3 == 0)
    return WATCH.update(mean, state, small_batches=parts)[1]


def one_macro_batch(state, key, n):
    """The same in two micro-batches."""
    optimizer = lb.accumulate_gradients(WATCH, every=2, small_batches=3)
    accumulating = optimizer.init(network())._replace(macro_step=n, inner_state=state)
    own = examples(key, 2)
    for i in range(2):
        part = jax.tree.map(lambda x, i=i: x[i], own)
        _, accumulating = optimizer.update(part, accumulating, network())
    return accumulating.inner_state


def on_device(state, own, n):
    """The same on two devices, each with an example."""
    own = jax.tree.map(lambda x: x[0], own)
    mean = jax.lax.pmean(own, "data")
    parts = lb.small_batches_of_devices(
        own, network(), axis_name="data", mean=mean, when=n % 3 == 0
    )
    return WATCH.update(mean, state, small_batches=parts)[1]


def by_shard_map():
    specs = (P(), P("data"), P())
    run = jax.jit(jax.shard_map(on_device, mesh=mesh_of(data=2), in_specs=specs, out_specs=P()))
    return lambda state, key, n: run(state, examples(key, 2), n)


def by_pmap():
    run = jax.pmap(on_device, axis_name="data", in_axes=(None, 0, None), devices=jax.devices()[:2])

    def step(state, key, n):
        own = jax.tree.map(lambda x: x[:, None], examples(key, 2))
        return jax.tree.map(lambda x: x[0], run(state, own, n))

    return step


ONE_STEP = {
    "examples": lambda: jax.jit(one_step),
    "micro-batches": lambda: jax.jit(one_macro_batch),
    "devices": pytest.param(by_shard_map, marks=needs_shard_map),
    "devices of pmap": pytest.param(by_pmap, marks=needs_shard_map),
}


@functools.cache
def averages_of_three():
    """Those of every third step, of single examples."""
    state, step = WATCH.init(network()), jax.jit(one_step)
    for key in KEYS[::3]:
        state = step(state, key, jnp.int32(0))
    return state


@pytest.mark.parametrize("make", ONE_STEP.values(), ids=ONE_STEP)
def test_only_the_steps_that_are_measured_count(make):
    """Seven steps with every third measured have the averages of those three, of any source."""
    state, step = WATCH.init(network()), make()
    for n, key in enumerate(KEYS):
        state = step(state, key, jnp.int32(n))
    expected = averages_of_three()
    assert expected.weight > 2
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4), state, expected)


SHAPE = (48, 40)
"""Of a gradient, that no other array has."""


def passes(optimizer, watched):
    """How many gradients the kernels of a compiled step read always and in branches; and copies.

    The text of a compiled program has a block for each kernel, with its arguments, and the names of
    those that a conditional has for branches.
    """
    param = jnp.ones(SHAPE)

    def step(state, own, mean, n):
        told = {}
        if watched:
            parts = lb.small_batches_of_examples(own, param, mean=mean, when=n % 10 == 0)
            told["small_batches"] = parts
        return optimizer.update(mean, state, param, **told)

    args = jnp.ones((2, *SHAPE)), param, jnp.int32(1)
    step = jax.jit(step, donate_argnums=0).lower(optimizer.init(param), *args)
    text = step.compile(as_users_have_it).as_text()
    blocks = dict(re.findall(r"^(?:ENTRY )?%?(\S+) \(.*?\{\n(.*?)^\}", text, re.M | re.S))
    listed = re.findall(r"branch_computations=\{(.*?)\}", text)
    branches = {name.strip(" %") for names in listed for name in names.split(",")}
    shape = rf"f32\[(?:2,)?{','.join(map(str, SHAPE))}\]\S*"

    def read(callers):
        kernels = [k for c in callers for k in re.findall(r"calls=%?([\w.-]+)", blocks[c])]
        return sum(len(re.findall(rf"{shape} parameter\(", blocks[k])) for k in kernels)

    return read(blocks.keys() - branches), read(branches), len(re.findall(rf"{shape} copy\(", text))


NOT_MEASURED = {
    "a step": lambda optimizer, every: optimizer,
    "a micro-batch": lambda optimizer, every: lb.accumulate_gradients(
        optimizer, every=2, small_batches=every
    ),
}


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="older XLA copies and counts otherwise")
@pytest.mark.parametrize("what", NOT_MEASURED)
def test_what_is_not_measured_reads_no_gradient_more(what):
    """All kernels that are added to those of `lamb` stand in branches, and nothing is copied."""
    wrapped, lamb = NOT_MEASURED[what], lb.lamb(0.1)
    plain = passes(wrapped(lamb, False), watched=False)
    watched = wrapped(lb.chain(lb.measure_noise_scale(), lamb), 10)
    always, in_branches, copies = passes(watched, watched=what == "a step")
    assert plain[0] > 0
    assert (always, copies) == (plain[0], plain[2])
    assert in_branches >= plain[1] + 2
