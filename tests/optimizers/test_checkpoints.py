"""Orbax saves every state and reads it back, for as many devices as there are then."""

from typing import NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import orbax.checkpoint as ocp
import pytest

import optax_largebatch as lb
from tests.optimizers.checkpointed import CHECKPOINTED, parameters, trained
from tests.optimizers.registry import named


def placed(optimizer, devices):
    """Where parameters and state lie on some devices: axes of length 8 are split among them."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("data",))
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec(*["data"][: x.ndim]))
        ),
        parameters(),
    )
    return jax.tree.map(lambda x: x.sharding, params), lb.optimizer_state_shardings(
        optimizer, params, mesh
    )


TOLERANCES = {"noise scale": 2e-5}
"""On another number of devices, of the largest value; it is averages of differences of norms."""


@pytest.mark.parametrize("name", named(CHECKPOINTED))
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
        target = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            abstract,
            placed(optimizer, devices),
        )
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


class WithoutRates(NamedTuple):
    """The state of `scale_by_learning_rate` before it kept the rates of the step."""

    count: jax.Array


def as_it_was(node):
    return (
        WithoutRates(node.count) if isinstance(node, lb.states.ScaleByLearningRateState) else node
    )


def test_a_checkpoint_of_an_older_layout_is_restored_by_names(tmp_path):
    """The recipe of the changelog: what it does not have is that of `init`."""
    optimizer, params = lb.accumulate_gradients(lb.lamb(0.1), every=1), parameters()
    params, state = trained(optimizer, params, optimizer.init(params), steps=range(3))
    older = jax.tree.map(as_it_was, state, is_leaf=lambda x: as_it_was(x) is not x)
    assert len(jax.tree.leaves(older)) == len(jax.tree.leaves(state)) - 1
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", older)
        checkpointer.wait_until_finished()
        saved = checkpointer.restore(tmp_path / "state")

    def name(path):
        return jax.tree_util.keystr(path, simple=True, separator="/")

    by_name = {name(path): leaf for path, leaf in jax.tree.leaves_with_path(saved)}
    restored = jax.tree.map_with_path(
        lambda path, leaf: by_name.get(name(path), leaf), optimizer.init(params)
    )
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    resumed, expected = (trained(optimizer, params, x, range(3, 5)) for x in (restored, state))
    jax.tree.map(np.testing.assert_array_equal, resumed, expected)
