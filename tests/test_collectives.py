"""The norms of a whole network travel together, in the compiled step of 18 leaves on 8 devices."""

import re

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import optax
import pytest

import optax_largebatch as lb
from tests.helpers import mesh_of, state_on

pytestmark = pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="jax.shard_map is jax 0.7")

OPTIMIZERS = {
    "lamb": (lb.lamb(1e-3, weight_decay=0.01), 1),
    "lans": (lb.lans(1e-3, weight_decay=0.01), 2),
    "lars": (lb.lars(1e-3, weight_decay=0.01), 1),
    "cain": (lb.cain(1e-3), 2),  # the sums along first axes and along second ones
    "lamb and its noise scale": (
        lb.chain(lb.measure_noise_scale(), lb.lamb(1e-3, weight_decay=0.01)),
        2,  # one of them in the steps that are measured
    ),
}


SHAPES = [(16, 16), (16,)] * 4 + [(16, 64), (64,)] * 2 + [(64, 16), (16,)] + [(64, 16), (32, 16)]
SHAPES += [(16,)] * 2
"""The parameters of a small transformer: a layer, a head, embeddings and a norm."""


def compiled_step(optimizer, way, shapes):
    """The text of the compiled step, all parameters and moments split along axis 0."""
    mesh = mesh_of(fsdp=8)
    split = NamedSharding(mesh, P("fsdp"))
    params = [jax.ShapeDtypeStruct(shape, "float32", sharding=split) for shape in shapes]
    state, shardings = state_on(mesh, optimizer, params)

    def step(params, state, gradients):
        told = {"partition_specs": split} if way == "jit, told" else {}
        if optimizer is OPTIMIZERS["lamb and its noise scale"][0]:
            own = jax.tree.map(lambda x: jnp.stack([x, x]), gradients)
            told["small_batches"] = lb.small_batches_of_examples(
                own, params, mean=gradients, when=state[0].weight < 9, **told
            )
        updates, state = optimizer.update(gradients, state, params, **told)
        return optax.apply_updates(params, updates), state

    if way == "shard_map":
        specs = (P("fsdp"), jax.tree.map(lambda sharding: sharding.spec, shardings))
        step = jax.shard_map(step, mesh=mesh, in_specs=(*specs, P("fsdp")), out_specs=specs)
    lowered = jax.jit(step, out_shardings=(split, shardings)).lower(params, state, params)
    return lowered.compile().as_text()


def all_reduces(optimizer, way):
    """Their number in the step of the 18 leaves."""
    return len(re.findall(r" all-reduce(?:-start)?\(", compiled_step(optimizer, way, SHAPES)))


# All ways for one of them, and one way for each of the others; the rest is left to `test-slow`.
CASES = [
    pytest.param(name, way, marks=[pytest.mark.slow] * (name != "lamb" and way != usual))
    for name, usual in zip(
        OPTIMIZERS, ("jit", "shard_map", "jit, told", "jit, told", None), strict=True
    )
    for way in ("jit", "jit, told", "shard_map")
    if name != "cain" or way == usual
]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_one_reduction_for_each_round_of_norms(name, way):
    optimizer, rounds = OPTIMIZERS[name]
    assert all_reduces(optimizer, way) == rounds


def test_one_leaf_at_a_time_it_would_be_two_each():
    """What is counted above is there to be counted: optax.lamb takes each norm twice."""
    with jax.numpy_dtype_promotion("standard"):
        assert all_reduces(optax.lamb(1e-3, weight_decay=0.01), "jit") >= 2 * 18 - 1


def test_numbers_of_layers_are_whole_before_the_mesh_takes_them():
    """XLA split the vector of radii before it took slices, and sent their edges to neighbours."""
    optimizer = lb.muonh(1e-3, stacked=lb.stacked_layers({"[0-2]": 0}))
    step = compiled_step(optimizer, "jit, told", [(8, 16, 16), (8, 16), (8, 16)])
    assert "all-gather" in step
    assert "collective-permute" not in step
