"""Gradients that were summed where their mean is meant are found out."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose
import pytest

import optax_largebatch as lb
from tests.wrappers.steps import EIGHT_DEVICES

pytestmark = EIGHT_DEVICES

FACTORS = {"the mean": 1, "the sum": 4, "divided twice": 1 / 4}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("reduction", FACTORS)
def test_tells_sums_from_means(reduction, check_vma):
    """One parameter is whole on every device, the other split and gathered for the loss."""
    mesh = jax.make_mesh((4, 2), ("data", "unused"), axis_types=(AxisType.Auto,) * 2)
    specs = {"bias": P(), "kernel": P("data")}
    params = {"bias": jnp.ones(3), "kernel": jnp.linspace(-1.0, 1.0, 24).reshape(8, 3)}
    examples = jnp.cos(jnp.arange(16.0 * 8)).reshape(16, 8)

    def of_all(params, examples):
        return jnp.mean(jnp.square(examples @ params["kernel"] + params["bias"][None] - 1.0))

    factor = FACTORS[reduction]
    gradients = jax.tree.map(lambda g: g * factor, jax.grad(of_all)(params, examples))

    def scale(params, gradients, examples):
        def loss(params):
            kernel = jax.lax.all_gather(params["kernel"], "data", tiled=True)
            return of_all(params | {"kernel": kernel}, examples)

        return lb.check_gradient_reduction(
            loss, params, gradients, axis_name="data", partition_specs=None if check_vma else specs
        )

    in_specs = (specs, specs, P("data"))
    check = jax.shard_map(scale, mesh=mesh, in_specs=in_specs, out_specs=P(), check_vma=check_vma)
    assert_allclose(jax.jit(check)(params, gradients, examples), factor, rtol=1e-5)
