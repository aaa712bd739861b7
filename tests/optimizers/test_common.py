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
from tests.helpers import compiled, first_step, given, trained, trajectory
from tests.optimizers.registry import OPTIMIZERS, named

pytestmark = pytest.mark.parametrize("name", named(OPTIMIZERS))


def mixed_tree(dtype="float32"):
    """Leaves of every rank; the first of them is of size 0, and one is absent."""
    leaves = {
        "dense": {"kernel": (4, 3), "bias": (3,)},
        "conv": {"kernel": (2, 2, 3, 2)},
        "absent": None,
        "bare": (0, 3),
        "scale": (),
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


def test_every_public_optimizer_is_registered(name):
    public = {
        public
        for public in lb.__all__
        if inspect.isfunction(getattr(lb, public))
        and getattr(lb, public).__module__.startswith(optimizers.__name__)
        and inspect.signature(getattr(lb, public)).return_annotation
        is optax.GradientTransformationExtraArgs
    }
    assert public == set(OPTIMIZERS)


def test_updates_keep_dtypes(name):
    """And the state its structure: what a scan carries may not change. A moment is bfloat16."""
    params = {dtype: mixed_tree(dtype) for dtype in ("float32", "bfloat16", "float16")}
    entry = OPTIMIZERS[name]
    optimizer = entry.make(**entry.known(mu_dtype="bfloat16"))
    after = train(optimizer, params)
    chex.assert_tree_all_finite(after)
    updates, _ = jax.eval_shape(optimizer.update, gradients_at(0, params), after[1], params)
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)


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
    params = small_tree()
    given = OPTIMIZERS[name].make(), gradients_at(0, params), params
    plain, extra = first_step(*given), first_step(*given, value=1.0, key="anything")
    chex.assert_trees_all_equal(plain, extra)


def test_vmap_over_models(name):
    optimizer = OPTIMIZERS[name].make()
    params = jnp.arange(1.0, 13.0).reshape(2, 3, 2)
    waves = lambda params, _: jnp.sin(params)  # noqa: E731
    final = compiled(lambda params: trained(optimizer, params, waves, jnp.arange(2))[0][0])
    alone = jnp.stack([*map(final, params)])
    chex.assert_trees_all_close(jax.vmap(final)(params), alone, rtol=1e-6)


def test_in_optax_chain_and_ours(name):
    optimizer, half = OPTIMIZERS[name].make(), optax.scale(0.5)
    theirs, _ = train(optax.chain(optimizer, half), small_tree())
    ours, _ = train(lb.chain(lb.clip_by_value(None), optimizer, half), small_tree())
    chex.assert_trees_all_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_in_optax_partition(name):
    """With masks that look at parameters which are hidden there."""
    entry = OPTIMIZERS[name]
    rate, rule = entry.kwargs["learning_rate"], ~lb.matching("scale")
    by_rule, by_function = (entry.known(weight_decay_mask=x) for x in (rule, rule.mask))
    parts = {
        "fast": entry.make(learning_rate=2 * rate, **by_rule),
        "slow": entry.make(**by_function),
        "none": entry.make(),
    }
    labels = {"dense": "fast", "conv": "slow", "scale": "fast", "bare": "slow", "absent": "none"}
    ours, _ = train(optax.partition(parts, labels), mixed_tree())
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
    ours, _ = train(injected(**entry.kwargs | settings), mixed_tree())
    chex.assert_trees_all_close(ours, expected, rtol=2e-5, atol=1e-6)


def test_mask_function_taken_for_a_schedule_is_an_error(name):
    entry = OPTIMIZERS[name]
    if "weight_decay_mask" not in entry.arguments:
        pytest.skip("it has no mask")
    settings = entry.kwargs | {"weight_decay": 0.1, "weight_decay_mask": lb.at_least_ndim(2).mask}
    trapped = optax.inject_hyperparams(entry.factory, static_args=entry.static_args)(**settings)
    with pytest.raises(TypeError, match=r"weight_decay_mask .* static_args"):
        trapped.init(mixed_tree())


@jax.numpy_dtype_promotion("standard")
def test_in_multi_steps(name):
    params, optimizer = small_tree(), OPTIMIZERS[name].make()
    every = optax.MultiSteps(optimizer, every_k_schedule=2).gradient_transformation()
    multi, _ = train(every, params, steps=4)
    gradients = gradients_at(slice(4), params)
    means = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]).mean(1), gradients)
    own = jax.tree.map(lambda x: x[-1], trajectory(optimizer, params, means))
    chex.assert_trees_all_close(multi, own, rtol=1e-5, atol=1e-6)


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
