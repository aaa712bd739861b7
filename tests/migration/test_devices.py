"""Adopted states on a mesh, under a guard of transfers, and from arrays of NumPy."""

import sys
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import optax_largebatch as lb
from tests.migration.changes import AFTER, BEFORE, OPTIMIZERS, before, largest_difference
from tests.migration.switches import CONTRIB, SCHEDULE, same_places
from tests.processes import run_together

WHOLE = {"kernel": jnp.arange(1.0, 33.0).reshape(4, 8), "bias": jnp.ones(8)}
MUONH = lb.muonh(SCHEDULE, beta=0.9, b2=0.999, radius="start")
MESH = jax.sharding.Mesh(jax.make_mesh((4, 2), ("a", "b")).devices, ("a", "b"))
SPECS = {
    "kernel": NamedSharding(MESH, PartitionSpec("a", "b")),
    "bias": NamedSharding(MESH, PartitionSpec("b")),
}
ON_MESH = lb.with_partition_specs(MUONH, SPECS)


@pytest.fixture
def sharded():
    return jax.device_put(WHOLE, SPECS)


def after_a_step(optimizer, params):
    return jax.jit(optimizer.update)(params, optimizer.init(params), params)[1]


@pytest.mark.parametrize("old", [CONTRIB, ON_MESH], ids=["contrib.muon", "muonh"])
def test_counters_and_radii_lie_where_init_puts_them(sharded, old):
    """In the old state they are on the first device."""
    state = after_a_step(old, sharded)
    first = jax.devices()[0]
    moved = jax.tree.map(lambda x: x if x.size > 2 else jax.device_put(x, first), state)
    adopted = lb.adopt_state(ON_MESH, sharded, moved)
    assert same_places(adopted, ON_MESH.init(sharded))
    jax.jit(ON_MESH.update)(sharded, adopted, sharded)


def test_the_count_of_optax_is_bound_to_no_device(sharded):
    adamw = optax.adamw(0.1)
    for state in (adamw.init(sharded), after_a_step(lb.lamb(0.1), sharded)):
        jax.jit(adamw.update)(sharded, lb.adopt_state(adamw, sharded, state, step=1), sharded)


def test_moments_stay_where_they_are(sharded):
    state = after_a_step(CONTRIB, WHOLE)
    adopted = lb.adopt_state(MUONH, sharded, state)
    for _, momenta in optax.tree.get_all_with_path(adopted, "mu"):
        for moment in jax.tree.leaves(momenta):
            assert moment.devices() == {jax.devices()[0]}


def test_arrays_of_numpy_are_put_where_init_puts_them(sharded):
    state = after_a_step(CONTRIB, sharded)
    adopted = lb.adopt_state(MUONH, sharded, jax.device_get(state))
    assert same_places(adopted, MUONH.init(sharded))
    chex.assert_trees_all_equal(adopted, lb.adopt_state(MUONH, sharded, state))


@pytest.mark.parametrize("old", [CONTRIB, ON_MESH], ids=["new", "both"])
def test_moments_are_compared_whatever_the_specs(sharded, old):
    """Specs are those of the real parameters, and the short ones that are compared are whole."""
    new = lb.with_partition_specs(lb.accumulate_gradients(MUONH, every=2), SPECS)
    lb.adopt_state(new, sharded, after_a_step(old, sharded), old_optimizer=old)


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="jax 0.6 has none")
def test_moments_are_compared_where_a_mesh_is_set(sharded):
    new = lb.with_partition_specs(MUONH, jax.tree.map(lambda own: own.spec, SPECS))
    with jax.set_mesh(MESH):
        lb.adopt_state(new, sharded, after_a_step(CONTRIB, sharded), old_optimizer=CONTRIB)


class Calls(NamedTuple):
    count: int


def test_a_counter_of_another_library_may_be_no_array():
    calls = optax.GradientTransformation(lambda _: Calls(0), lambda updates, *of: (updates, of[0]))
    adopted = lb.adopt_state(optax.chain(CONTRIB, calls), WHOLE, after_a_step(CONTRIB, WHOLE))
    assert adopted[1].count == 1


@pytest.mark.parametrize("compared", [False, True], ids=["", "compared"])
def test_under_a_guard_of_transfers(compared):
    state = after_a_step(CONTRIB, WHOLE)
    new = lb.accumulate_gradients(MUONH, every=2)
    old_optimizer = CONTRIB if compared else None
    expected = lb.adopt_state(new, WHOLE, state)
    with jax.transfer_guard("disallow"):
        adopted = lb.adopt_state(new, WHOLE, state, old_optimizer=old_optimizer)
        again = lb.adopt_state(new, WHOLE, adopted)
    chex.assert_trees_all_equal(adopted, expected)
    chex.assert_trees_all_equal(again, expected)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.usefixtures("standard_promotion", "x64")
def test_another_process_with_fewer_devices_goes_on_from_a_checkpoint(tmp_path, monkeypatch):
    """It stacks the layers, and takes them apart again."""
    with ocp.StandardCheckpointer() as checkpointer:
        for name in OPTIMIZERS:
            run = before(name)
            split = NamedSharding(MESH, PartitionSpec("a", "b"))
            params = jax.device_put(run.params, split)
            layout = lb.optimizer_state_shardings(run.optimizer, params, MESH)
            checkpointer.save(tmp_path / name, (params, jax.device_put(run.state, layout)))
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    command = [sys.executable, "-m", "tests.migration.other_process", str(tmp_path)]
    run_together([command], devices=2, logs=[tmp_path / "log.txt"], seconds=300)
    for name in OPTIMIZERS:
        unchanged = before(name).until(BEFORE + AFTER).weights()
        with np.load(tmp_path / f"{name}.npz") as changed:
            assert largest_difference({**changed}, unchanged) <= 1e-12, name
