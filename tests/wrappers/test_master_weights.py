"""Low-precision parameters with masters are, after every step, exactly the rounded masters."""

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import optax
import pytest

import optax_largebatch as lb
from tests.engine.steps import lowered
from tests.helpers import compiled, drawn, first_step, given, trained
from tests.optimizers.registry import OPTIMIZERS, named
from tests.wrappers.steps import EIGHT_DEVICES, in_shards, steps

# `optax.apply_updates` adds a float32 update to a bfloat16 parameter.
pytestmark = pytest.mark.usefixtures("standard_promotion")


GIVEN_STEPS = optax.stateless(lambda steps, params: steps)
"""An inner transformation whose steps are the gradients."""
HOSTILE = [0.0, 1.0, -1.0, 1.0 + 2**-8, 1.0 + 2**-9, 1 - 2**-9, 3e-5, 6e-8, 1e-20, -1e-20, 6e4, 7e3]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_parameters_are_the_rounded_masters(dtype):
    """Between any two of the hostile values, and along random walks over many magnitudes."""
    rng = np.random.default_rng(0)
    pairs = np.stack(np.meshgrid(HOSTILE, HOSTILE)).reshape(2, -1)
    magnitudes = np.exp(rng.uniform(-15, 5, (40, 10_000)))
    walks = rng.normal(size=magnitudes.shape) * magnitudes
    targets = np.concatenate([np.tile(pairs, (20, 1)), walks], axis=1).astype("float32")
    optimizer = lb.master_weights(GIVEN_STEPS)

    @jax.jit
    def step(params, state, target):
        updates, state = optimizer.update(target - state.master, state, params)
        return optax.apply_updates(params, updates), state

    params = jnp.asarray(targets[0], dtype)
    state = optimizer.init(params)
    for target in targets[1:]:
        before = np.abs(np.asarray(state.master))
        params, state = step(params, state, jnp.asarray(target))
        assert_array_equal(params, state.master.astype(dtype))
        # The step itself is off by roundings of float32 only.
        error = np.abs(np.asarray(state.master) - target)
        assert np.all(error <= 2**-22 * np.maximum(before, np.abs(target)))


@pytest.mark.parametrize("name", named(OPTIMIZERS))
def test_trains_as_float32(name):
    optimizer = OPTIMIZERS[name].make()
    params = drawn({"kernel": (4, 3)}, "bfloat16") | drawn({"gain": ()}, "float16")
    gradients = drawn({"kernel": (7, 4, 3)}, "bfloat16", 1) | drawn({"gain": (7,)}, "float16", 1)

    def after(optimizer, *arrays):
        return compiled(lambda p, g: trained(optimizer, p, given, g)[0])(*arrays)

    low, state = after(lb.master_weights(optimizer), params, gradients)
    wide = optax.tree.cast((params, gradients), "float32")
    full, full_state = after(optimizer, *wide)
    chex.assert_trees_all_close(state.master, full, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_equal(
        low, jax.tree.map(lambda x, master: master.astype(x.dtype), params, state.master)
    )
    chex.assert_trees_all_equal_shapes_and_dtypes(state.inner_state, full_state)


def test_precise_parameters_have_no_second_copy():
    params = {"low": jnp.ones(2, "bfloat16"), "full": jnp.ones(2)}
    optimizer = lb.master_weights(optax.sgd(0.1))
    state = optimizer.init(params)
    assert state.master["full"].nbytes == 2
    updates, state = optimizer.update(params, state, params)
    assert jax.tree.map(lambda x: x.dtype, updates) == {"low": "float32", "full": "float32"}
    assert_array_equal(updates["full"], jnp.full(2, -0.1))


def test_leaves_without_gradient_stay():
    params = {"a": jnp.ones(2, "bfloat16"), "b": jnp.ones((0, 3), "float16")}
    optimizer = lb.master_weights(lb.lamb(0.1))
    state = optimizer.init(params)
    updates, after = optimizer.update({"a": None, "b": params["b"]}, state, params)
    assert updates["a"] is None
    assert_array_equal(after.master["a"], state.master["a"])


def test_parameters_stay_between_macro_batches():
    optimizer = lb.master_weights(lb.accumulate_gradients(lb.lamb(1e-4), every=3))
    params = jnp.linspace(-1.0, 1.0, 7).astype("bfloat16")
    taken = steps(optimizer, [jnp.cos(params)] * 6, params=params)
    for number, (new, _) in enumerate(taken, start=1):
        assert np.array_equal(new, params) == (number % 3 > 0)
        params = new


def test_under_scan_and_unrolled_in_one_computation():
    """XLA may leave out the rounding of a parameter that it still has at hand."""
    optimizer = lb.master_weights(lb.lamb(0.01, stacked={}))
    start = jnp.linspace(-1.0, 1.0, 1000).astype("bfloat16")

    def waves(params, _):
        return jnp.cos(3 * params)

    def loop(params):
        state = optimizer.init(params)
        for _ in range(5):
            updates, state = optimizer.update(waves(params, None), state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    scanned, state = jax.jit(lambda x: trained(optimizer, x, waves, jnp.arange(5))[0])(start)
    assert_array_equal(scanned, state.master.astype("bfloat16"))
    unrolled, state = jax.jit(loop)(start)
    assert_array_equal(unrolled, state.master.astype("bfloat16"))
    assert_allclose(scanned.astype("float32"), unrolled.astype("float32"), rtol=1e-2)


@EIGHT_DEVICES
@pytest.mark.parametrize("check_vma", [True, False])
def test_stacked_and_split_between_devices(check_vma):
    specs = {"bias": P(), "layers": P(None, "fsdp")}
    params = {
        "bias": jnp.linspace(0.1, 1.0, 3).astype("bfloat16"),
        "layers": jnp.linspace(-3.0, 1.0, 48).reshape(2, 8, 3).astype("bfloat16"),
    }
    optimizer = lb.master_weights(lb.lamb(0.1, stacked=lb.stacked_layers({"layers": 0})))

    def train(params, partition_specs=None):
        gradients, state = jax.tree.map(jnp.cos, params), optimizer.init(params)
        for _ in range(2):
            updates, state = optimizer.update(
                gradients, state, params, partition_specs=partition_specs
            )
            params = optax.apply_updates(params, updates)
        return params, state.master

    sharded = in_shards(lambda params: train(params, specs), (specs,), (specs, specs), check_vma)
    (ours, master), (_, expected) = sharded(params), train(params)
    chex.assert_trees_all_close(master, expected, rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_equal(ours, optax.tree.cast(master, "bfloat16"))


def test_float64_masters(x64):
    optimizer = lb.master_weights(optax.sgd(1e-9), dtype="float64")
    start = jnp.ones(1, "float32")
    *_, (params, state) = steps(optimizer, [jnp.ones(1)] * 3, params=start)
    assert_allclose(1 - state.master, 3e-9, rtol=1e-6)
    assert params.dtype == jnp.float32


def test_strict_promotion_has_a_way():
    params = jnp.ones(3, "bfloat16")
    optimizer = lb.master_weights(lb.accumulate_momentum())
    with jax.numpy_dtype_promotion("strict"):
        updates, state = first_step(optimizer, params, params)
        params = jax.tree.map(lambda w, u: (w.astype(u.dtype) + u).astype(w.dtype), params, updates)
    assert_array_equal(params, state.master.astype("bfloat16"))


@pytest.mark.parametrize("name", ["lamb", "lans", "lars"])
def test_a_gradient_is_cast_where_it_is_read(name):
    """On a GPU a wider copy would be written and read again in each pass."""
    optimizer = lb.master_weights(getattr(lb, name)(1e-3, weight_decay=0.01))
    params = {"kernel": jax.ShapeDtypeStruct((512, 512), "bfloat16")}
    (text,) = lowered(optimizer, params, "cuda")
    main = text.split("func.func private")[0].splitlines()
    wider = [line for line in main if "convert" in line and "512x512xbf16" in line]
    assert len(wider) == 1  # the parameter, for the update is the difference to it
