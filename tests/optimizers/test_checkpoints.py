"""Orbax saves every state and reads it back, for as many devices as there are then."""

import chex
from flax import serialization
import jax
from jax.sharding import PartitionSpec
import numpy as np
import orbax.checkpoint as ocp
import pytest

import optax_largebatch as lb
from tests.conftest import slow_but
from tests.helpers import shapes_on, shardings_on
from tests.optimizers.checkpointed import CHECKPOINTED, parameters, trained


def placed(optimizer, devices):
    """Where parameters and state lie on some devices: axes of length 8 are split among them."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("data",))
    params = parameters()
    split = shardings_on(mesh, jax.tree.map(lambda x: PartitionSpec(*["data"][: x.ndim]), params))
    layout = lb.optimizer_state_shardings(optimizer, shapes_on(params, split), mesh)
    return split, layout


TOLERANCES = {"noise scale": 2e-5}
"""On another number of devices, of the largest value; it is averages of differences of norms."""


QUICK = ("lamb", "mixed precision", "muonh", "noise scale", "stochastic rounding")
"""Between them they have each kind of state."""


@pytest.mark.parametrize("name", slow_but(QUICK, CHECKPOINTED))
def test_training_goes_on_from_a_checkpoint(name, tmp_path):
    """Saved from eight devices and read for eight, to the same bits; and for two."""
    optimizer = CHECKPOINTED[name]()
    params = parameters()
    start = jax.device_put((params, optimizer.init(params)), placed(optimizer, 8))
    saved = trained(optimizer, *start, steps=range(3))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
    expected = trained(optimizer, *saved, steps=range(3, 5))
    abstract = jax.eval_shape(lambda params: (params, optimizer.init(params)), params)
    for devices in (8, 2):
        target = shapes_on(abstract, placed(optimizer, devices))
        with ocp.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(tmp_path / "state", target)
        assert jax.tree.structure(restored) == jax.tree.structure(saved)
        jax.tree.map(np.testing.assert_array_equal, restored, saved)
        assert all(len(x.sharding.device_set) == devices for x in jax.tree.leaves(restored))
        resumed = trained(optimizer, *restored, steps=range(3, 5))
        for one, other in zip(jax.tree.leaves(resumed), jax.tree.leaves(expected), strict=True):
            one, other = np.asarray(one, "float64"), np.asarray(other, "float64")
            tolerance = 0 if devices == 8 else TOLERANCES.get(name, 1e-5) * np.abs(other).max()
            np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_flax_writes_a_state_as_bytes_and_reads_it_back(name):
    state = CHECKPOINTED[name]().init(parameters())
    read = serialization.from_bytes(state, serialization.to_bytes(state))
    chex.assert_trees_all_equal(read, state)
