"""Inside `jax.shard_map` a norm is that of the whole block, not of the shard."""

import math
import re

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from numpy.testing import assert_allclose
import pytest

import optax_largebatch as lb
from tests import helpers
from tests.helpers import first_step, mesh_of, shardings_on
from tests.optimizers.registry import OPTIMIZERS, named

pytestmark = pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="jax.shard_map is jax 0.7")

SPECS = {
    "rows": PartitionSpec("fsdp"),
    "both": PartitionSpec("fsdp", "tensor"),
    "columns": PartitionSpec(None, "tensor"),
    "replicated": PartitionSpec(),
}


def mesh():
    return mesh_of(fsdp=4, tensor=2)


def network():
    return helpers.drawn(dict.fromkeys(SPECS, (8, 4)))


def gradients_at(params, index):
    return jax.tree.map(lambda x: jnp.cos(x * (1 + index)), params)


def trained(optimizer, params):
    return helpers.trained(optimizer, params, gradients_at, jnp.arange(6.0))[0][0]


def everything(name):
    """The optimizer, and around it links with a global norm and two directions."""
    return lb.chain(
        lb.clip_by_global_norm(2.0), lb.normalize_by_block_norm(), OPTIMIZERS[name].make()
    )


@pytest.mark.parametrize("name", named(n for n, x in OPTIMIZERS.items() if not x.needs_specs))
def test_equals_a_single_device(name):
    optimizer = everything(name)
    sharded = jax.shard_map(
        lambda params: trained(optimizer, params), mesh=mesh(), in_specs=(SPECS,), out_specs=SPECS
    )
    ours = jax.jit(sharded)(network())
    expected = jax.jit(lambda params: trained(optimizer, params))(network())
    for leaf in SPECS:
        assert_allclose(ours[leaf], expected[leaf], rtol=2e-5, atol=1e-6)


def sent_by(optimizer, shape):
    """The text of a step in `jax.shard_map`, three of whose parameters are split."""
    params = jax.device_put(dict.fromkeys(SPECS, jnp.ones(shape)), shardings_on(mesh(), SPECS))
    state = optimizer.init(params)
    layout = lb.optimizer_state_shardings(optimizer, params, mesh())
    specs = jax.tree.map(lambda own: own.spec, layout)

    def step(params, state):
        return optimizer.update(params, state, params, partition_specs=SPECS)

    sharded = jax.shard_map(step, mesh=mesh(), in_specs=(SPECS, specs), out_specs=(SPECS, specs))
    text = jax.jit(sharded).lower(params, state).as_text()
    assert not re.search("all_gather|all_to_all", text)
    return text


def test_sums_along_axes_are_sent_as_one_vector_for_each_axis():
    """And in every step, so that no device waits for a choice; with the first a sum for each."""
    text = sent_by(lb.cain(0.1), (64, 48))
    assert sizes_sent(text) == [3 * 64 + 3, 3 * 48]
    assert "stablehlo.case" not in text


def test_only_products_of_matrices_need_the_whole():
    """The gradient is sent only where matrices learn."""
    text = sent_by(lb.learned_gradient(0.1), (64, 48))
    assert max(sizes_sent(text)) == 64 * 48
    always = re.sub(r'"stablehlo.case".*?\n    \}\) :', "", text, flags=re.DOTALL)
    assert sizes_sent(always).count(64 * 48) == 3


def sizes_sent(text):
    """The elements of each array that the devices add up."""
    sent = re.findall(r"stablehlo.all_reduce.*?\(tensor<([\dx]*)x?f32>\)", text, re.DOTALL)
    return [math.prod(int(n) for n in x.split("x") if n) for x in sent]


STACKED = lb.lamb(0.1, stacked=lb.stacked_layers({"w": 0}))
WRONG_SPECS = {
    "a stack whose type does not say along what it is split": (STACKED, None, "must be given"),
    "not how it is split": (lb.lamb(0.1), PartitionSpec("tensor"), "it differs .* axes 'fsdp'"),
    "too long": (lb.lamb(0.1), PartitionSpec("fsdp", None, None), "more axes than 'w' of shape"),
    "no spec": (lb.lamb(0.1), {"w": "fsdp"}, "must hold a .*PartitionSpec .* for 'w', got 'fsdp'"),
    "another tree": (lb.lamb(0.1), {"v": PartitionSpec()}, "must have the tree structure"),
}


@pytest.mark.parametrize("case", WRONG_SPECS)
def test_wrong_specs_are_errors(case):
    optimizer, specs, message = WRONG_SPECS[case]

    def step(params):
        return first_step(optimizer, params, params, partition_specs=specs)[0]

    split = PartitionSpec("fsdp")
    sharded = jax.shard_map(step, mesh=mesh(), in_specs=split, out_specs=split)
    with pytest.raises((TypeError, ValueError), match=message):
        sharded({"w": jnp.ones((8, 4))})


@pytest.mark.parametrize("name", named(n for n, x in OPTIMIZERS.items() if x.needs_specs))
class TestAlongAxes:
    def step(self, name, specs):
        optimizer = OPTIMIZERS[name].make()
        return jax.shard_map(
            lambda params: trained(optimizer, params), mesh=mesh(), in_specs=specs, out_specs=specs
        )

    def test_types_do_not_say_along_which_axis_a_parameter_is_split(self, name):
        optimizer = OPTIMIZERS[name].make()
        state = optimizer.init(network())
        step = jax.shard_map(
            lambda params: optimizer.update(params, state, params)[0],
            mesh=mesh(),
            in_specs=(SPECS,),
            out_specs=SPECS,
        )
        says = r"partition_specs must be given .* 'both', which is split along 'fsdp', 'tensor'"
        with pytest.raises(ValueError, match=says):
            step(network())

    def test_arrays_of_axes_are_made_for_whole_parameters(self, name):
        if name in ("muon", "muonh"):
            pytest.skip("its state is like the parameters")
        says = r"init needs whole parameters.* got 'both' split along \['fsdp', 'tensor'\]"
        with pytest.raises(ValueError, match=says):
            self.step(name, (SPECS,))(network())

    def test_parameters_that_every_device_has_whole(self, name):
        ours = jax.jit(self.step(name, PartitionSpec()))(network())
        optimizer = OPTIMIZERS[name].make()
        expected = jax.jit(lambda params: trained(optimizer, params))(network())
        for leaf in SPECS:
            assert_allclose(ours[leaf], expected[leaf], rtol=2e-5, atol=1e-6)
