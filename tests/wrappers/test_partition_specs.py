"""An optimizer that is told where it is built how the parameters are split."""

import re

import chex
from flax import nnx
from flax.training.train_state import TrainState
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import optax_largebatch as lb

several_devices = pytest.mark.skipif(
    jax.device_count() < 8 or not hasattr(jax, "shard_map"),
    reason="needs eight devices, and jax.shard_map",
)
SPECS = {"bias": P(), "first": P("x", "y"), "second": P("y", "x")}


def mesh_of_two_axes():
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


def network():
    rng = np.random.default_rng(0)
    shapes = {"bias": (16,), "first": (8, 16), "second": (8, 16)}
    return {name: jnp.asarray(rng.normal(size=shape), "float32") for name, shape in shapes.items()}


def shardings_on(mesh):
    return {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}


class Recorder:
    """A transformation that notes which specs it is given."""

    def __init__(self):
        self.given = []
        self.transform = optax.GradientTransformationExtraArgs(self.init, self.update)

    def init(self, params):
        return optax.EmptyState()

    def update(self, updates, state, params=None, *, partition_specs=None, **extra_args):
        self.given.append(partition_specs)
        return updates, state


@several_devices
@pytest.mark.parametrize("told_as", ["tree", "function"])
def test_a_trainer_that_passes_nothing_on_gathers_no_matrix(told_as):
    """Flax's TrainState calls `update(gradients, state, params)`."""
    mesh = mesh_of_two_axes()
    shardings = shardings_on(mesh)
    specs = shardings if told_as == "tree" else lambda params: {x: shardings[x] for x in params}
    optimizer = lb.with_partition_specs(lb.muon(0.02, weight_decay=0.1), specs)
    params = jax.device_put(network(), shardings)
    state = TrainState.create(apply_fn=None, params=params, tx=optimizer)

    @jax.jit
    def step(state):
        gradients = jax.tree.map(jnp.cos, state.params)
        return state.apply_gradients(grads=gradients)

    program = step.lower(state).compile().as_text()
    assert len(re.findall(r" all-to-all(?:-start)?\(", program)) == 2
    assert not re.search(r" all-gather(?:-start)?\(", program)
    alone = TrainState.create(apply_fn=None, params=network(), tx=lb.muon(0.02, weight_decay=0.1))
    chex.assert_trees_all_close(
        jax.device_get(step(state).params), step(alone).params, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    "around",
    [
        lambda inner: inner,
        lambda inner: optax.chain(optax.clip(1.0), inner),
        lambda inner: lb.chain(lb.clip_by_value(1.0), inner),
        lambda inner: optax.masked(inner, {"bias": False, "first": True, "second": True}),
        lambda inner: lb.muon(0.1, others=inner),
        lambda inner: lb.accumulate_gradients(inner, every=1),
        lb.dynamic_loss_scale,
        lb.master_weights,
        lb.skip_bad_steps,
        lb.stochastic_rounding,
    ],
    ids=[
        "alone",
        "optax.chain",
        "chain",
        "masked",
        "others",
        "accumulate_gradients",
        "dynamic_loss_scale",
        "master_weights",
        "skip_bad_steps",
        "stochastic_rounding",
    ],
)
@pytest.mark.parametrize("outside", [True, False])
def test_the_specs_reach_the_optimizer_in_every_wrapper(around, outside):
    recorder = Recorder()
    if outside:
        optimizer = lb.with_partition_specs(around(recorder.transform), P())
    else:
        optimizer = around(lb.with_partition_specs(recorder.transform, P()))
    params = network()
    optimizer.update(params, optimizer.init(params), params)
    assert recorder.given == [P()]


@several_devices
def test_specs_in_the_boxes_of_nnx():
    """As MaxText has them: `nnx.get_partition_spec` leaves a Variable around each."""
    mesh = mesh_of_two_axes()

    class Model(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("x", "y"), mesh=mesh)
            self.linear = nnx.Linear(8, 16, kernel_init=init, rngs=rngs)

    boxed = nnx.state(Model(nnx.Rngs(0)), nnx.Param)
    recorder = Recorder()
    for specs in (nnx.get_partition_spec(boxed), nnx.get_named_sharding(boxed, mesh)):
        optimizer = lb.with_partition_specs(recorder.transform, specs)
        optimizer.update(boxed, optimizer.init(boxed), boxed)
        given = recorder.given[-1]["linear"]
        assert isinstance(given["kernel"], P | NamedSharding)
        assert getattr(given["kernel"], "spec", given["kernel"]) == P("x", "y")


def test_what_a_call_passes_takes_precedence():
    recorder = Recorder()
    optimizer = lb.with_partition_specs(recorder.transform, P())
    params = network()
    for given in (None, P(None)):
        optimizer.update(params, optimizer.init(params), params, partition_specs=given)
    assert recorder.given == [P(), P(None)]


def test_the_state_is_that_of_the_optimizer():
    params = network()
    optimizer = lb.lamb(0.1)
    wrapped = lb.with_partition_specs(optimizer, P())
    chex.assert_trees_all_equal(wrapped.init(params), optimizer.init(params))


@pytest.mark.parametrize("specs", ["fsdp", {"bias": P(), "first": "x"}, 3, {"bias": ("x", None)}])
def test_what_is_no_spec(specs):
    with pytest.raises(TypeError, match=r"partition_specs must be a tree of .*PartitionSpec"):
        lb.with_partition_specs(lb.lamb(0.1), specs)
    optimizer = lb.with_partition_specs(lb.lamb(0.1), lambda params: specs)
    params = network()
    with pytest.raises(TypeError, match=r"partition_specs must be a tree of .*PartitionSpec"):
        optimizer.update(params, optimizer.init(params), params)


def test_what_is_no_optimizer():
    with pytest.raises(TypeError, match="inner must be a gradient transformation"):
        lb.with_partition_specs(lb.lamb, P())
