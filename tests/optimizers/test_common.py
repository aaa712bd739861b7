"""What every optimizer does, whichever it is."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_largebatch as lb
from optax_largebatch import optimizers
from tests.conftest import enable_x64
from tests.helpers import compiled, given, trained
from tests.optimizers.registry import OPTIMIZERS, named

pytestmark = pytest.mark.parametrize("name", named(OPTIMIZERS))
DTYPES = ("float32", "bfloat16", "float16")


def mixed_tree(dtype="float32"):
    """Leaves of every rank, one of them of size 0 and one without any gradient."""
    leaves = {
        "dense": {"kernel": (4, 3), "bias": (3,)},
        "conv": {"kernel": (2, 2, 3, 2)},
        "scale": (),
        "empty": (0, 3),
        "absent": None,
    }
    shapes, structure = jax.tree.flatten(leaves, is_leaf=lambda x: isinstance(x, tuple))
    rng = np.random.default_rng(0)
    return structure.unflatten([jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes])


def small_tree():
    """Enough for tests of what stands around an optimizer: Muon, too, has a part of each."""
    dense = mixed_tree()["dense"]
    return {"dense": dense, "absent": None}


def gradients_at(step, params):
    """Fixed, noisy gradients; `step` may be a slice."""
    noise = np.random.default_rng(1).normal(size=(8, 64))
    return jax.tree.map(
        lambda leaf: jnp.asarray(
            noise[step, : leaf.size].reshape((*noise[step, 0].shape, *leaf.shape)), leaf.dtype
        ),
        params,
    )


def train(optimizer, params, steps=6):
    """Parameters and state after some steps in one compiled scan."""
    with jax.numpy_dtype_promotion("standard"):  # optax's wrappers are not strict
        state = optimizer.init(params)
    run = compiled(lambda params, state, over: trained(optimizer, params, given, over, state)[0])
    return run(params, state, gradients_at(slice(steps), params))


@functools.cache
def trained_alone(name, **changes):
    """Parameters and state of an optimizer by itself, compiled once for the tests that compare."""
    with enable_x64(False):
        return train(OPTIMIZERS[name].make(**changes), mixed_tree())


@functools.cache
def step_of(name):
    """An optimizer and its `update`, compiled once for the tests that take single steps."""
    optimizer = OPTIMIZERS[name].make()
    return optimizer, compiled(optimizer.update)


def assert_same_training(optimizer, expected):
    params = mixed_tree()
    ours, _ = train(optimizer, params)
    chex.assert_trees_all_close(ours, expected, rtol=2e-5, atol=1e-6)
    moved = jax.tree.map(lambda a, b: bool(jnp.any(a != b)) or a.size == 0, ours, params)
    assert all(jax.tree.leaves(moved))


def test_every_public_optimizer_is_registered(name):
    public = {
        public
        for public in lb.__all__
        if inspect.isfunction(getattr(lb, public))
        and getattr(lb, public).__module__.startswith(optimizers.__name__)
        and inspect.signature(getattr(lb, public)).return_annotation
        is optax.GradientTransformationExtraArgs
    }
    assert name in public
    assert public == set(OPTIMIZERS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_updates_keep_dtype_and_state_keeps_structure_under_scan(name, dtype):
    params = mixed_tree(dtype)
    optimizer = OPTIMIZERS[name].make()
    new_params, state = trained_alone(name) if dtype == "float32" else train(optimizer, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(new_params, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, optimizer.init(params))
    chex.assert_tree_all_finite((new_params, state))
    updates, _ = jax.eval_shape(optimizer.update, gradients_at(0, params), state, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)


def test_float64_leaves_keep_their_precision(name, x64):
    params = mixed_tree("float64")
    new_params, state = train(OPTIMIZERS[name].make(), params)
    chex.assert_trees_all_equal_dtypes(new_params, params)
    single, _ = trained_alone(name)
    chex.assert_trees_all_close(
        jax.tree.map(lambda x: np.asarray(x, "float64"), single), new_params, rtol=0.5
    )
    doubles = [x for x in jax.tree.leaves(state) if x.dtype == jnp.float64]
    assert len(doubles) >= len(jax.tree.leaves(params))


def test_no_recompilation_on_the_second_call(name):
    optimizer = OPTIMIZERS[name].make()
    step = compiled(optimizer.update)
    params = mixed_tree()
    state = optimizer.init(params)
    for index in range(3):
        updates, state = step(gradients_at(index, params), state, params)
        params = optax.apply_updates(params, updates)
    assert step._cache_size() == 1


def test_accepts_unknown_extra_args(name):
    optimizer = OPTIMIZERS[name].make()
    params = small_tree()
    plain = optimizer.update(gradients_at(0, params), optimizer.init(params), params)
    extra = optimizer.update(
        gradients_at(0, params), optimizer.init(params), params, value=1.0, key="anything"
    )
    chex.assert_trees_all_equal(plain, extra)


def test_vmap_over_models(name):
    optimizer = OPTIMIZERS[name].make()
    params = {"kernel": jnp.arange(1.0, 13.0).reshape(2, 3, 2)}

    @compiled
    def final(params):
        state = optimizer.init(params)
        for _ in range(2):
            updates, state = optimizer.update(jax.tree.map(jnp.sin, params), state, params)
            params = optax.apply_updates(params, updates)
        return params

    together = jax.vmap(final)(params)
    for index in range(2):
        alone = final(jax.tree.map(lambda x, i=index: x[i], params))
        chex.assert_trees_all_close(
            jax.tree.map(lambda x, i=index: x[i], together), alone, rtol=1e-6
        )


def test_in_optax_chain_and_ours(name):
    optimizer = OPTIMIZERS[name].make()

    def halved_update(updates, state, params):
        updates, state = optimizer.update(updates, state, params)
        return jax.tree.map(lambda update: 0.5 * update, updates), state

    halved = optax.GradientTransformation(optimizer.init, halved_update)
    expected, _ = train(halved, small_tree())
    for chained in (
        optax.chain(optimizer, optax.scale(0.5)),
        lb.chain(optimizer, optax.scale(0.5)),
        lb.chain(lb.clip_by_value(None), optimizer, optax.scale(0.5)),
    ):
        ours, _ = train(chained, small_tree())
        chex.assert_trees_all_close(ours, expected, rtol=1e-6, atol=1e-7)


def test_in_optax_masked(name):
    entry = OPTIMIZERS[name]
    params = mixed_tree()
    no_scale = (~lb.matching("scale")).mask
    function, rule = (
        entry.make(**entry.known(weight_decay_mask=mask))
        for mask in (no_scale, ~lb.matching("scale"))
    )
    ours, _ = train(optax.masked(function, no_scale), params)
    rule, _ = train(optax.masked(rule, no_scale), params)
    alone, _ = trained_alone(name)
    chex.assert_trees_all_close(ours, rule)
    chex.assert_trees_all_close(ours["dense"], alone["dense"], rtol=1e-6, atol=1e-7)
    chex.assert_trees_all_close(
        ours["scale"], train(optax.identity(), params)[0]["scale"], rtol=1e-6
    )


def test_in_optax_partition(name):
    entry = OPTIMIZERS[name]
    rate = entry.kwargs["learning_rate"]
    labels = {"dense": "fast", "conv": "slow", "scale": "fast", "empty": "slow", "absent": "none"}
    parts = optax.partition(
        {"fast": entry.make(learning_rate=2 * rate), "slow": entry.make(), "none": entry.make()},
        labels,
    )
    ours, _ = train(parts, mixed_tree())
    fast, _ = trained_alone(name, learning_rate=2 * rate)
    slow, _ = trained_alone(name)
    chex.assert_trees_all_close(ours["dense"], fast["dense"], rtol=1e-6, atol=1e-7)
    chex.assert_trees_all_close(ours["conv"], slow["conv"], rtol=1e-6, atol=1e-7)


MATRICES = ~lb.matching("bias", "scale")


def test_in_inject_hyperparams(name):
    entry = OPTIMIZERS[name]
    injected = optax.inject_hyperparams(entry.factory, static_args=entry.static_args)
    settings = entry.known(weight_decay=0.1, weight_decay_mask=MATRICES)
    expected, _ = trained_alone(name, **settings)
    settings = entry.kwargs | settings
    assert_same_training(injected(**settings), expected)

    ramp = optax.linear_schedule(0.0, entry.kwargs["learning_rate"], 4)
    scheduled = injected(**(settings | {"learning_rate": ramp}))
    state = scheduled.init(mixed_tree())
    assert state.hyperparams["learning_rate"] == 0.0


def test_mask_function_taken_for_a_schedule_is_an_error(name):
    entry = OPTIMIZERS[name]
    if "weight_decay_mask" not in entry.arguments:
        pytest.skip("it has no mask")

    def mask(params):
        return jax.tree.map(lambda leaf: leaf.ndim > 1, params)

    settings = entry.kwargs | {"weight_decay": 0.1, "weight_decay_mask": mask}
    trapped = optax.inject_hyperparams(entry.factory, static_args=entry.static_args)(**settings)
    with pytest.raises(TypeError, match=r"weight_decay_mask .* static_args"):
        trapped.init(mixed_tree())
    static = (*entry.static_args, "weight_decay_mask")
    kept = optax.inject_hyperparams(entry.factory, static_args=static)(**settings)
    expected, _ = trained_alone(name, weight_decay=0.1, weight_decay_mask=MATRICES)
    assert_same_training(kept, expected)


def test_in_multi_steps(name):
    params = small_tree()
    optimizer = OPTIMIZERS[name].make()
    every = optax.MultiSteps(optimizer, every_k_schedule=2)
    step = compiled(every.update)
    with jax.numpy_dtype_promotion("standard"):
        state = every.init(params)
        multi = params
        for index in range(4):
            updates, state = step(gradients_at(index, params), state, multi)
            multi = optax.apply_updates(multi, updates)
    own = params
    state = optimizer.init(params)
    step = compiled(optimizer.update)
    for index in (0, 2):
        pair = [gradients_at(index + i, params) for i in range(2)]
        mean = jax.tree.map(lambda a, b: (a + b) / 2, *pair)
        updates, state = step(mean, state, own)
        own = optax.apply_updates(own, updates)
    chex.assert_trees_all_close(multi, own, rtol=1e-5, atol=1e-6)


def test_in_apply_if_finite(name):
    optimizer = optax.apply_if_finite(OPTIMIZERS[name].make(), max_consecutive_errors=5)
    params = small_tree()
    state = optimizer.init(params)
    bad = gradients_at(0, params)
    bad["dense"]["kernel"] = bad["dense"]["kernel"].at[0, 0].set(jnp.nan)
    step = compiled(optimizer.update)
    updates, skipped = step(bad, state, params)
    chex.assert_trees_all_equal(updates, jax.tree.map(jnp.zeros_like, params))
    chex.assert_trees_all_equal(skipped.inner_state, state.inner_state)
    good = gradients_at(0, params)
    after_skip = step(good, skipped, params)[0]
    chex.assert_trees_all_equal(after_skip, step(good, state, params)[0])


@pytest.mark.parametrize("zero", ["gradients", "parameters", "both"])
def test_zeros_give_no_nan(name, zero):
    params = mixed_tree()
    zeros = jax.tree.map(jnp.zeros_like, params)
    start = params if zero == "gradients" else zeros
    optimizer, step = step_of(name)
    state = optimizer.init(start)
    for index in range(3):
        gradients = gradients_at(index, params) if zero == "parameters" else zeros
        updates, state = step(gradients, state, start)
        chex.assert_tree_all_finite((updates, state))
        start = optax.apply_updates(start, updates)
    if zero == "both":
        chex.assert_trees_all_equal(start, zeros)


@pytest.mark.parametrize("missing", ["kernel", "bias"])
def test_a_gradient_that_is_none_moves_nothing(name, missing):
    """The parameter is frozen in this step; the others move as they would."""
    if name == "lbsgd":
        pytest.skip("it sums the gradients of micro-batches, so that none may be None")
    optimizer, step = step_of(name)
    params = mixed_tree()
    state = optimizer.init(params)
    gradients = gradients_at(0, params)
    of_all, _ = step(gradients, state, params)
    gradients["dense"][missing] = None
    updates, after = step(gradients, state, params)
    moved = updates["dense"].pop(missing)
    assert moved is None or not np.any(moved)
    chex.assert_trees_all_equal_structs(after, state)
    if name != "scaled_adam":  # it clips by a norm of all
        del of_all["dense"][missing]
        chex.assert_trees_all_close(updates, of_all, rtol=1e-5, atol=1e-7)


# A number with a trust ratio gets smaller and smaller; it cannot change its sign.
START = {"vector": [1.0, 1.0, -1.0], "matrix": [[1.0, 2.0], [2.0, 1.0]], "scalar": -1.0}
TARGET = {"vector": [1.0, -1.0, 2.0], "matrix": [[1.0, 0.0], [-1.0, 1.0]], "scalar": -2.0}


def test_converges(name):
    start, target = (
        {key: jnp.asarray(x) for key, x in values.items()} for values in (START, TARGET)
    )
    entry = OPTIMIZERS[name]
    steps = 3000
    rate = optax.linear_schedule(entry.peak, 0.0, steps)
    optimizer = entry.make(learning_rate=rate, **entry.known(weight_decay=0.0))

    def shown(params):
        """The parameters, with the norms of the target where an optimizer cannot change norms."""

        def own(x, goal):
            kept = entry.keeps_norms and x.ndim > 1
            return x * (jnp.linalg.norm(goal) / jnp.linalg.norm(x)) if kept else x

        return jax.tree.map(own, params, target)

    def distance(params):
        squares = jax.tree.map(lambda a, b: jnp.sum(jnp.square(a - b)), shown(params), target)
        return jax.tree.reduce(jnp.add, squares)

    downhill = lambda params, _: jax.grad(distance)(params)  # noqa: E731
    run = jax.jit(lambda start: trained(optimizer, start, downhill, jnp.arange(steps))[0][0])
    params = run(start)
    chex.assert_trees_all_close(shown(params), target, rtol=1e-2, atol=1e-2)
