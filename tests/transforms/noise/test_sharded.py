"""Small batches of parameters that are split over devices."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose
import pytest

import optax_largebatch as lb
from tests.helpers import mesh_of, shardings_on
from tests.transforms.noise.quadratic import (
    STACKED,
    examples,
    needs_shard_map,
    network,
)

SPECS = {"bias": P(), "kernel": P("tensor"), "layers": P("tensor")}


@needs_shard_map
@pytest.mark.parametrize("check_vma", [True, False])
def test_parameters_split_over_another_axis(check_vma):
    """Blocks are split, and a stack between its layers; the state is that of one device."""
    optimizer = lb.measure_noise_scale(stacked=STACKED)
    params = network()
    gradients = jax.tree.map(lambda x: x + 3, examples(jax.random.key(0), 4))

    def state(params, own, parts_of, mean, **extra_args):
        parts = parts_of(own, params, mean=mean(own), batch_size=2, stacked=STACKED, **extra_args)
        start = optimizer.init(network())
        return optimizer.update(mean(own), start, params, small_batches=parts)[1]

    def on_mesh(params, gradients):
        return state(
            params,
            jax.tree.map(lambda x: x[0], gradients),
            functools.partial(lb.small_batches_of_devices, axis_name="data"),
            lambda own: jax.lax.pmean(own, "data"),
            partition_specs=SPECS,
        )

    def on_one_device(params, gradients):
        def mean(own):
            return jax.tree.map(lambda x: x.mean(0), own)

        return state(params, gradients, lb.small_batches_of_examples, mean)

    apart = {name: P("data", *spec) for name, spec in SPECS.items()}
    run = jax.shard_map(
        on_mesh,
        mesh=mesh_of(data=4, tensor=2),
        in_specs=(SPECS, apart),
        out_specs=P(),
        check_vma=check_vma,
    )
    ours, theirs = (jax.jit(way)(params, gradients) for way in (run, on_one_device))
    jax.tree.map(lambda x, y: assert_allclose(x, y, rtol=1e-4), ours, theirs)


@needs_shard_map
@pytest.mark.parametrize("check_vma", [True, False])
def test_micro_batches_of_split_parameters(check_vma):
    watch = lb.measure_noise_scale(stacked=STACKED)
    optimizer = lb.accumulate_gradients(watch, every=2, small_batches=True, stacked=STACKED)
    parts = [jax.tree.map(lambda x, i=i: jnp.cos(x + i), network()) for i in range(2)]

    def scale(params, parts, **extra_args):
        state = optimizer.init(params)._replace(inner_state=watch.init(network()))
        none = lb.SmallBatches.none(6)  # of the whole stack
        state = state._replace(small_batches=none)
        for gradients in parts:
            _, state = optimizer.update(gradients, state, params, **extra_args)
        return state.inner_state

    run = jax.shard_map(
        functools.partial(scale, partition_specs=SPECS),
        mesh=mesh_of(tensor=2),
        in_specs=(SPECS, [SPECS] * 2),
        out_specs=P(),
        check_vma=check_vma,
    )
    ours, expected = (jax.jit(way)(network(), parts) for way in (run, scale))
    jax.tree.map(lambda x, y: assert_allclose(x, y, rtol=1e-4), ours, expected)


@needs_shard_map
@pytest.mark.slow
@pytest.mark.parametrize("told", [True, False], ids=["told", "not told"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_under_jit_on_a_mesh(kind, told):
    """In micro-batches."""
    specs = {"bias": P(), "kernel": P("fsdp"), "layers": P("fsdp")}
    watch = lb.chain(lb.measure_noise_scale(stacked=STACKED), lb.lamb(0.1, stacked=STACKED))
    optimizer = lb.accumulate_gradients(watch, every=2, small_batches=True, stacked=STACKED)

    def measured(params, gradients, **extra_args):
        state = optimizer.init(params)
        for i in range(2):
            own = jax.tree.map(lambda x, i=i: x[i], gradients)
            _, state = optimizer.update(own, state, params, **extra_args)
        return state.inner_state[0]

    gradients = examples(jax.random.key(0), 2)
    expected = jax.jit(measured)(network(), gradients)
    devices = mesh_of(kind, fsdp=2)
    with jax.set_mesh(devices):
        behind = {name: P(None, *spec) for name, spec in specs.items()}
        args = jax.device_put((network(), gradients), shardings_on(devices, (specs, behind)))
        told = {"partition_specs": specs} if told else {}
        ours = jax.jit(functools.partial(measured, **told))(*args)
    jax.tree.map(lambda x, y: assert_allclose(x, y, rtol=1e-4), jax.device_get(ours), expected)


@needs_shard_map
def test_norms_of_devices_and_of_their_mean_take_one_reduction():
    def parts(gradients, mean):
        own = jax.tree.map(lambda x: x[0], gradients)
        return lb.small_batches_of_devices(own, network(), axis_name="data", mean=mean)

    run = jax.shard_map(parts, mesh=mesh_of(data=8), in_specs=(P("data"), P()), out_specs=P())
    gradients = jax.tree.map(lambda x: jnp.ones((8, *x.shape)), network())
    traced = jax.make_jaxpr(run)(gradients, network())
    assert str(traced).count(" psum") == 1  # the compiler may combine some
