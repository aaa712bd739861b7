"""NorMuon's part of Muon: recorded runs of three originals are in test_golden."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose
import pytest

import optax_largebatch as lb
from optax_largebatch.testing import check
from tests.conftest import slow_but
from tests.helpers import drawn
from tests.test_same_everywhere import in_shard_map, on_a_mesh, on_one_device

SHAPES = {"kernel": (8, 16), "too": (8, 16), "tall": (16, 8), "layers": (3, 8, 24)}
SPECS = {
    "kernel": P("fsdp"),
    "too": P(None, "fsdp"),
    "tall": P("fsdp"),
    "layers": P(None, None, "fsdp"),
}


@pytest.mark.parametrize("side", slow_but(("longer",), ["columns", "longer"]))
def test_does_the_same_however_it_is_run(side):
    params = drawn({"kernel": (4, 6), "too": (4, 6), "tall": (8, 2)})
    check(lambda stacked: lb.normalize_neurons(side=side, stacked=stacked), params)


def normuon():
    stacked = {"layers": 0}
    return lb.chain(
        lb.orthogonalize_momentum(stacked=stacked),
        lb.normalize_neurons(stacked=stacked),
        lb.scale_by_matrix_shape(0.2, stacked=stacked),
        lb.add_decayed_weights(0.1, cautious=True),
        lb.scale_by_learning_rate(0.1),
    )


@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="jax.shard_map is jax 0.7")
@pytest.mark.parametrize("run", [on_a_mesh, in_shard_map])
def test_a_chain_on_a_mesh(run, x64):
    params = drawn(SHAPES, "float64")
    expected, _ = on_one_device(normuon(), params)
    found, _ = run(normuon(), params, specs=SPECS)
    for name, x in expected.items():
        assert_allclose(found[name], x, rtol=1e-10, atol=1e-12, err_msg=name)


def test_the_norm_stays_and_neurons_become_equal():
    wide = drawn({"kernel": (8, 16)})["kernel"]
    for update, side, axis in ((wide, "columns", 0), (wide.T, "longer", 1)):
        transform = lb.normalize_neurons(0.0, eps=1e-30, side=side)
        found, _ = transform.update(update, transform.init(update))
        lengths = jnp.linalg.norm(found, axis=axis)
        assert_allclose(lengths, lengths[0], rtol=1e-5)
        assert_allclose(jnp.linalg.norm(found), jnp.linalg.norm(update), rtol=1e-5)


def decayed(cautious):
    params = {"w": jnp.array([1.0, -1.0, 1.0, 2.0])}
    transform = lb.add_decayed_weights(0.1, cautious=cautious)
    updates = {"w": jnp.array([1.0, 1.0, 0.0, -3.0])}
    return transform.update(updates, transform.init(params), params)[0]["w"]


def test_a_cautious_decay_goes_the_way_of_the_step():
    assert_allclose(decayed(cautious=False), [1.1, 0.9, 0.1, -2.8], rtol=1e-6)
    assert_allclose(decayed(cautious=True), [1.1, 1.0, 0.1, -3.0], rtol=1e-6)
