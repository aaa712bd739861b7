"""Macro-batches."""

import re

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import optax
import pytest

import optax_largebatch as lb
from tests.engine.steps import compiled_step, lowered
from tests.helpers import drawn, first_step
from tests.wrappers.steps import EIGHT_DEVICES, in_shards, steps

PARAMS = {"kernel": jnp.arange(1.0, 7.0).reshape(2, 3), "bias": jnp.ones(3)}


def micro_gradients(count):
    return [drawn({"kernel": (2, 3), "bias": (3,)}, seed=seed) for seed in range(count)]


@pytest.mark.parametrize(
    "inner", [lb.lamb(0.1), optax.sgd(0.1, momentum=0.9)], ids=["ours", "foreign"]
)
@pytest.mark.parametrize("every", [1, 3])
def test_equals_the_inner_optimizer_on_means(inner, every):
    gradients = micro_gradients(3 * every)
    means = [
        jax.tree.map(lambda *parts: sum(parts) / every, *gradients[start : start + every])
        for start in range(0, len(gradients), every)
    ]
    on_means, expected = steps(inner, means, params=PARAMS), PARAMS
    optimizer = lb.accumulate_gradients(inner, every=every)
    for number, (params, state) in enumerate(steps(optimizer, gradients, params=PARAMS), start=1):
        if number % every == 0:
            expected, _ = next(on_means)
        chex.assert_trees_all_close(params, expected, rtol=1e-5)
        assert (state.macro_step, state.micro_step) == divmod(number, every)


def test_inner_is_not_computed_between_macro_batches():
    calls = []

    def update(updates, state, params=None):
        jax.debug.callback(lambda: calls.append(1))
        return updates, state

    inner = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    optimizer = lb.accumulate_gradients(inner, every=4)
    state = optimizer.init(PARAMS)
    step = jax.jit(optimizer.update)
    for gradient in micro_gradients(8):
        _, state = step(gradient, state, PARAMS)
    jax.effects_barrier()
    assert len(calls) == 2


def last(optimizer, dtype, gradients):
    """The updates and the state after the last of some micro-batches."""
    params = jnp.zeros(1, dtype)
    state = optimizer.init(params)
    for gradient in gradients:
        updates, state = optimizer.update(jnp.full(1, gradient, dtype), state, params)
    return updates, state


def test_sums_in_float32():
    """256 + 1 is 256 in bfloat16."""
    optimizer = lb.accumulate_gradients(optax.scale(1.0), every=4)
    updates, state = last(optimizer, "bfloat16", [256.0, 1.0, 1.0, 2.0])
    assert state.accumulator.dtype == jnp.float32
    assert_array_equal(np.asarray(updates, "float32"), [65.0])


def test_nan_stays_in_its_macro_batch():
    """The original poisons the weights at once: it multiplies the NaN by a rate of 0."""
    (value, _), *_ = values(lb.lbsgd(0.1, batch_scale=2), [(np.nan, {})])
    assert value == 0


def values(optimizer, micro_batches):
    """The parameter after each micro-batch: a gradient and the extra arguments of `update`."""
    gradients, extra_args = zip(*micro_batches, strict=True)
    gradients = [jnp.full(1, gradient) for gradient in gradients]
    for params, state in steps(optimizer, gradients, extra_args, jnp.zeros(1)):
        yield float(params[0]), state


@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_every_may_be_a_schedule_of_the_macro_batches(dtype):
    """Two micro-batches, then three, then one."""
    sizes = jnp.array([2, 3, 1], dtype)
    optimizer = lb.accumulate_gradients(optax.sgd(1.0), every=lambda step: sizes[step])
    seen = list(values(optimizer, [(float(x), {}) for x in (1, 3, 1, 2, 6, 7, 8)]))
    assert [value for value, _ in seen] == [0, -2, -2, -2, -5, -12, -20]
    assert [int(state.macro_step) for _, state in seen] == [0, 1, 1, 1, 2, 3, 4]


@pytest.mark.parametrize("every", [1, 2], ids="every {}".format)
def test_micro_batches_weigh_as_many_examples_as_they_have(every):
    optimizer = lb.accumulate_gradients(optax.sgd(1.0), every=every)
    batches = [(1.0, {"examples": 48}), (5.0, {"examples": 16})]
    *_, (value, state) = values(optimizer, batches)
    assert value == (-2.0 if every == 2 else -6.0)
    assert float(state.examples) == 0


def test_flush_takes_the_step_of_a_partial_macro_batch():
    """The flag is traced, so that both cases are one compiled step."""
    optimizer = lb.accumulate_gradients(optax.sgd(1.0), every=3)
    batches = [(2.0, {"flush": i == 1, "examples": 1.5}) for i in range(5)]
    seen = list(values(optimizer, batches))
    assert [value for value, _ in seen] == [0, -2, -2, -2, -4]
    assert [int(state.micro_step) for _, state in seen] == [1, 0, 1, 2, 0]


@pytest.mark.parametrize("every", [1, 2], ids="every {}".format)
def test_a_micro_batch_without_examples_adds_nothing(every):
    """Not even a NaN; and there is no step before the first example."""
    optimizer = lb.accumulate_gradients(optax.sgd(1.0), every=every)
    empty, full = (np.nan, {"examples": 0}), (4.0, {"examples": 8})
    seen = list(values(optimizer, [empty, empty, full]))
    assert [value for value, _ in seen] == [0, 0, -4]
    assert int(seen[1][1].macro_step) == 0


def test_a_mean_is_not_rounded_to_the_dtype_of_the_sum():
    """1/3 is no number of bfloat16; compiled, XLA on a CPU would leave such a rounding out."""
    optimizer = lb.accumulate_gradients(optax.scale(1.0), every=3, accumulator_dtype="bfloat16")
    with jax.disable_jit():
        updates, state = last(optimizer, "float32", [1.0, 0.0, 0.0])
    assert state.accumulator.dtype == jnp.bfloat16
    assert_allclose(updates, [1 / 3], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_updates_are_rounded_to_the_parameters_alone(dtype):
    """Not to the dtype of the sum, in whose memory they may have been; 0.7 is no number of it."""
    optimizer = lb.accumulate_gradients(optax.sgd(0.7), every=2, accumulator_dtype="bfloat16")
    with jax.disable_jit():
        updates, state = last(optimizer, dtype, [1.0] * 4)
    assert_array_equal(updates, jnp.full(1, -0.7, dtype))
    assert state.accumulator.dtype == jnp.bfloat16


@pytest.mark.parametrize("every", [1, 2], ids="every {}".format)
def test_every_parameter_needs_a_gradient(every):
    """As in `optax.MultiSteps`: there is nothing to sum."""
    optimizer = lb.accumulate_gradients(optax.sgd(0.1), every=every)
    with pytest.raises(ValueError, match=r"sums them; that of 'bias' is None.*the same filter for"):
        first_step(optimizer, PARAMS | {"bias": None}, PARAMS)


def loop(optimizer, has_updated):
    """A loop that was written for `optax.MultiSteps`: what it reads of the state, and the end."""
    taken = [*steps(optimizer, micro_gradients(5), params=PARAMS)]
    seen = [(int(x.mini_step), int(x.gradient_step), bool(has_updated(x))) for _, x in taken]
    return taken[-1][0], seen


@jax.numpy_dtype_promotion("standard")
def test_in_the_place_of_multi_steps():
    inner = optax.adam(0.1)
    theirs = optax.MultiSteps(inner, 2)
    expected, seen = loop(theirs, theirs.has_updated)
    params, ours = loop(lb.accumulate_gradients(inner, every=2), lb.has_updated)
    assert ours == seen == [(1, 0, False), (0, 1, True), (1, 1, False), (0, 2, True), (1, 2, False)]
    chex.assert_trees_all_close(params, expected, rtol=1e-6)
    assert loop(theirs, lb.has_updated)[1] == seen


def test_has_updated_finds_the_one_state_that_knows():
    accumulated = lb.accumulate_gradients(lb.lamb(0.1), every=2)
    state = lb.master_weights(lb.skip_bad_steps(accumulated)).init(PARAMS)
    assert not lb.has_updated(state)
    assert not jax.jit(lb.has_updated)(state)
    with pytest.raises(ValueError, match=r"state must hold one state .* got 0 of them in a tuple"):
        lb.has_updated(lb.lamb(0.1).init(PARAMS))
    with pytest.raises(ValueError, match="got 2 of them"):
        lb.has_updated((accumulated.init(PARAMS), accumulated.init(PARAMS)))


ONCE = optax.sgd(1.0)
LEAVING_OUT = {
    "skip_bad_steps": lb.skip_bad_steps,
    "spikes": lambda inner: lb.skip_bad_steps(inner, deviations=6),
    "dynamic_loss_scale": lambda inner: lb.dynamic_loss_scale(
        inner, initial_scale=1.0, growth_interval=2
    ),
}


def pairs(inner):
    return lb.accumulate_gradients(inner, every=2)


def pairs_of_optax(inner):
    return optax.MultiSteps(inner, 2).gradient_transformation()


@jax.numpy_dtype_promotion("standard")  # for optax.MultiSteps
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside"])
@pytest.mark.parametrize("accumulated", [pairs, pairs_of_optax])
@pytest.mark.parametrize("wrapper", LEAVING_OUT)
def test_a_micro_batch_that_is_left_out_has_not_updated(wrapper, accumulated, beside):
    """Right after a step, too. What `optax.partition` has beside it does not matter."""
    optimizer = lb.average_weights(LEAVING_OUT[wrapper](accumulated(ONCE)), half_life=1)
    if beside:
        others = lb.skip_bad_steps(optax.sgd(0.1))
        optimizer = optax.partition({"pairs": optimizer, "others": others}, labels_of)
    bad = jnp.nan
    seen = updated_after(optimizer, [1.0, 1.0, bad, bad, 1.0, bad, 1.0, 1.0, 1.0])
    assert seen == [0, 1, 0, 0, 0, 0, 1, 0, 1]


@pytest.mark.parametrize("wrapper", LEAVING_OUT)
def test_a_step_that_is_left_out_has_not_updated(wrapper):
    """Its mean is not finite. The macro-batch is complete, but nothing has moved."""
    optimizer = pairs(LEAVING_OUT[wrapper](ONCE))
    seen = updated_after(optimizer, [1.0, 1.0, 1.0, jnp.nan, 1.0, 1.0])
    assert seen == [0, 1, 0, 0, 0, 1]


def labels_of(params):
    return {name: "pairs" if name == "kernel" else "others" for name in params}


def updated_after(optimizer, values):
    """Whether `has_updated` says so after each micro-batch; and it is so."""
    params, state, seen = PARAMS, optimizer.init(PARAMS), []
    update = jax.jit(optimizer.update)
    for value in values:
        gradient = jax.tree.map(lambda x, value=value: jnp.full_like(x, value), PARAMS)
        updates, state = update(gradient, state, params)
        moved = bool(jnp.any(updates["kernel"] != 0))
        seen.append(bool(lb.has_updated(state)))
        assert seen[-1] == moved
        params = optax.apply_updates(params, updates)
    return seen


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="older XLA copies and counts otherwise")
@pytest.mark.parametrize("inner", [lb.lamb(0.1), optax.sgd(0.1, 0.9)], ids=["ours", "foreign"])
def test_waiting_copies_nothing(inner):
    """The mean lies in the place of the sum, and the updates after it; all else in its own."""
    params = [jnp.zeros((512, 128)) for _ in range(16)]
    compiled = compiled_step(pairs(inner), params)
    assert not re.findall(r"f32\[512,128\]\S* copy\(", compiled.as_text())
    # On a CPU a few small arrays at a time are written before they are added.
    assert compiled.memory_analysis().temp_size_in_bytes < 0.3 * sum(x.nbytes for x in params)


@pytest.mark.parametrize("wrapper", [pairs, lb.skip_bad_steps, lb.dynamic_loss_scale])
def test_the_order_of_the_branches_is_kept(wrapper):
    """On a GPU all state would be copied, if XLA took the choice for one by a boolean.

    It puts the branch of True first then, and leaves state in its place in the first one alone.
    """
    (text,) = lowered(wrapper(lb.lamb(0.1)), PARAMS, "cuda")
    lines = text.splitlines()
    (choice,) = [line for line in lines if '"stablehlo.case"' in line]
    index = re.search(r'case"\((%\d+)\)', choice)[1]
    place = lines.index(choice)
    chosen = next(line for line in reversed(lines[:place]) if f" {index} = " in line)
    assert "clamp" in chosen
    waiting = lines[place + 1]
    assert "stablehlo.return" in waiting or "constant" in waiting


@pytest.mark.parametrize(
    ("extra_args", "error", "message"),
    [
        ({"examples": -1}, ValueError, r"examples must be in \[0, inf\), got -1"),
        ({"examples": jnp.ones(2)}, ValueError, "examples must be a scalar"),
        ({"examples": "8"}, TypeError, "examples must be a number"),
        ({"flush": 1}, TypeError, "flush must be True, False or a boolean scalar array, got 1"),
        ({"flush": jnp.ones(2, bool)}, TypeError, "flush must be True, False"),
    ],
)
def test_bad_extra_arguments(extra_args, error, message):
    optimizer = lb.accumulate_gradients(lb.lamb(0.1), every=2)
    with pytest.raises(error, match=message):
        first_step(optimizer, PARAMS, PARAMS, **extra_args)


@EIGHT_DEVICES
def test_examples_that_differ_between_devices_are_an_error():
    optimizer = lb.accumulate_gradients(lb.lamb(0.1), every=2)

    def step(params, counts):
        state = optimizer.init(params)
        return optimizer.update(params, state, params, examples=counts[0])[0]

    with pytest.raises(ValueError, match=r"examples must be the same .* axes 'fsdp'.*psum"):
        in_shards(step, (P(), P("fsdp")), P())(PARAMS, jnp.ones(8))


@pytest.mark.parametrize("every", [2, lb.values_schedule([2, 3])])
def test_its_schedule_is_tried_though_transfers_are_forbidden(every):
    optimizer = lb.accumulate_gradients(optax.sgd(0.1), every=every)
    with jax.transfer_guard("disallow"):
        state = jax.jit(optimizer.init)(PARAMS)
        _, state = jax.jit(optimizer.update)(PARAMS, state, PARAMS)
    assert state.micro_step == 1
