"""Flax linen on a mesh: logical axes in boxes, `eval_shape`, `out_shardings` and donation."""

import functools

from flax import linen
from flax.training.train_state import TrainState
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
import optax
import pytest

import optax_largebatch as lb
from tests.clients.training import (
    NAMES,
    NEEDS_JAX_0_8,
    OPTIMIZERS,
    accumulated,
    assert_has_ratios,
    step_of_train_state,
    through_a_checkpoint,
    trained,
)

RULES = (("embed", "fsdp"), ("mlp", "tensor"), ("batch", "fsdp"))


class Net(linen.Module):
    @linen.compact
    def __call__(self, x):
        def dense(width, axes):
            init = linen.with_logical_partitioning(linen.initializers.lecun_normal(), axes)
            return linen.Dense(width, kernel_init=init)

        x = jnp.tanh(dense(8, ("embed", "mlp"))(x))
        return dense(4, ("mlp", "embed"))(x)


NET = Net()


def batch(number):
    x = jax.random.normal(jax.random.key(number), (16, 4))
    return x, jnp.roll(x, 1, axis=1)


def first_state(name):
    params = NET.init(jax.random.key(0), batch(0)[0])["params"]
    return TrainState.create(apply_fn=NET.apply, params=params, tx=accumulated(OPTIMIZERS[name]()))


@NEEDS_JAX_0_8
@pytest.mark.parametrize("name", NAMES)
def test_trains_saves_and_goes_on(name, tmp_path):
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    make = functools.partial(first_state, name)
    abstract = jax.eval_shape(make)
    specs = linen.get_partition_spec(abstract)
    shardings = linen.logical_to_mesh_sharding(specs, mesh, RULES)
    step = jax.jit(step_of_train_state, donate_argnums=0, out_shardings=(shardings, None))
    start = jax.jit(make, out_shardings=shardings)()
    read_back = functools.partial(through_a_checkpoint, tmp_path / "run")
    (state,) = trained(step, (start,), read_back, batch)

    # The boxes say where the moments lie, and so does optimizer_state_shardings.
    params = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        linen.meta.unbox(abstract.params),
        shardings.params,
    )
    ours = lb.optimizer_state_shardings(abstract.tx, params, mesh)
    for one, other, leaf in zip(
        jax.tree.leaves(ours),
        jax.tree.leaves(shardings.opt_state),
        jax.tree.leaves(abstract.opt_state),
        strict=True,
    ):
        assert one.is_equivalent_to(other, leaf.ndim)
    assert_has_ratios({"Dense_0/kernel", "Dense_1/kernel"}, state.tx, state, state.params)
    assert not optax.tree.get(state.opt_state, "gave_up")
