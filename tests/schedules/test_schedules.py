"""Schedules against the tables recorded from their originals, and at their edges."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import optax
import pytest

import optax_largebatch as lb
from tests import golden

MXNET = golden.schedules("mxnet_1_9_1")
ICEFALL = golden.schedules("icefall_schedules")


def over(schedule, steps):
    return np.asarray(jax.vmap(schedule)(jnp.arange(steps)))


@pytest.mark.parametrize("name", [name for name in MXNET if name.startswith("poly")])
def test_mxnet_poly_scheduler(name, x64):
    settings = dict(MXNET[name]["kwargs"])
    peak, steps = settings.pop("base_lr"), settings.pop("max_update")
    warmup, begin = settings.pop("warmup_steps", 0), settings.pop("warmup_begin_lr", 0.0)
    shape = {"decay": "polynomial", "power": settings.pop("pwr")}
    shape["end_value"] = settings.pop("final_lr", 0.0)
    if settings.pop("warmup_mode", "linear") == "constant":
        decay = lb.warmup_decay(peak, total_steps=steps - warmup, **shape)
        schedule = optax.join_schedules([optax.constant_schedule(begin), decay], [warmup])
    else:
        schedule = lb.warmup_decay(
            peak, total_steps=steps, warmup_steps=warmup, warmup_begin_value=begin, **shape
        )
    assert not settings
    expected = MXNET[name]["values"]
    assert_allclose(over(schedule, len(expected)), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("strategy", ["linear", "power2", "sqrt"])
def test_mxnet_warmup_multiplier(strategy, x64):
    table = MXNET[f"warmup_multiplier_{strategy}"]
    settings = table["kwargs"]
    steps = settings["warmup_epochs"] * settings["updates_per_epoch"]
    schedule = lb.large_batch_warmup(
        1.0, batch_scale=settings["batch_scale"], warmup_steps=steps, strategy=strategy
    )
    assert_allclose(over(schedule, len(table["values"])), table["values"], rtol=1e-12)


@pytest.mark.parametrize("name", ICEFALL)
def test_icefall_eden(name, x64):
    table = dict(ICEFALL[name])
    warmup = {
        "warmup_batches": table.pop("warmup_batches", 0),
        "warmup_start": table.pop("warmup_start", 1.0),
    }
    if name.startswith("eden2"):
        rows = table.pop("rows_batch_lr")
        schedule = lb.eden2(table.pop("base"), lr_batches=table.pop("lr_batches"), **warmup)
    else:
        rows = table.pop("rows_batch_epoch_lr")
        schedule = lb.eden(
            table.pop("base"),
            lr_batches=table.pop("lr_batches"),
            lr_epochs=table.pop("lr_epochs"),
            **warmup,
        )
    assert not table
    for *where, expected in rows:
        assert_allclose(schedule(*where), expected, rtol=1e-12)


def test_eden_takes_the_epoch_from_the_step_or_the_loop():
    schedule = lb.eden(0.1, lr_batches=100, lr_epochs=2, steps_per_epoch=30)
    for step in (0, 29, 30, 500):
        assert_allclose(schedule(step), schedule(step, step // 30), rtol=1e-6)
    with pytest.raises(ValueError, match="steps_per_epoch"):
        lb.eden(0.1)(3)


SHAPES = {
    "linear": (None, lambda r: 1 - r),
    "cosine": (None, lambda r: (1 + math.cos(math.pi * r)) / 2),
    "sqrt": (None, lambda r: 1 - math.sqrt(r)),
    "constant": (None, lambda r: 1.0),
    "polynomial": (0.5, lambda r: (1 - r) ** 0.5),
    "power": (0.4, lambda r: 1 - r**0.4),
}


@pytest.mark.parametrize("decay", SHAPES)
@pytest.mark.parametrize("begin", [0, -2])
@pytest.mark.parametrize("counted_from", [None, 0])
def test_each_shape_by_its_formula(decay, begin, counted_from, x64):
    power, left = SHAPES[decay]
    schedule = lb.warmup_decay(
        2.0, total_steps=20, decay=decay, power=power, end_value=0.2, warmup_steps=5,
        warmup_begin_value=0.5, warmup_begin_step=begin, hold_steps=4,
        decay_begin_step=counted_from,
    )  # fmt: skip
    hold_end = 5 + begin + 4
    first = hold_end if counted_from is None else counted_from

    def expected(t):
        if t - begin < 5:
            return 0.5 + 1.5 * (t - begin) / 5
        return 2.0 if t < hold_end else 0.2 + 1.8 * left(min((t - first) / (20 - first), 1))

    assert_allclose(over(schedule, 25), [expected(t) for t in range(25)], rtol=1e-9)


@pytest.mark.parametrize("decay", SHAPES)
def test_a_warmup_or_a_hold_to_the_end_does_not_divide_by_zero(decay):
    shape = {"decay": decay, "power": SHAPES[decay][0], "end_value": 0.25}
    warmed = lb.warmup_decay(1.0, total_steps=10, warmup_steps=10, **shape)
    held = lb.warmup_decay(1.0, total_steps=10, hold_steps=10, **shape)
    last = 1.0 if decay == "constant" else 0.25
    with jax.debug_nans(True):
        assert_allclose(over(warmed, 12), [*np.arange(10) / 10, last, last], rtol=1e-6)
        assert_allclose(over(held, 12), [*np.ones(10), last, last], rtol=1e-6)


def test_inverse_sqrt():
    found = over(lb.warmup_inverse_sqrt(3.0, warmup_steps=4), 17)
    assert_allclose(found[[0, 1, 4, 9, 16]], [0, 0.75, 3, 2, 1.5], rtol=1e-6)


def test_drops():
    found = over(lb.warmup_drops(2.0, drop_steps=[4, 6], factor=0.5, warmup_steps=2), 8)
    assert_allclose(found, [0, 1, 2, 2, 1, 1, 0.5, 0.5])


def test_short_warmup_does_not_grow():
    assert_allclose(
        over(lb.large_batch_warmup(0.5, batch_scale=8, warmup_steps=1), 3), [0.5, 4.0, 4.0]
    )
    assert_allclose(over(lb.large_batch_warmup(0.5, batch_scale=8, warmup_steps=0), 2), [4.0, 4.0])


@pytest.mark.parametrize("kind", [list, tuple, iter, np.array, jnp.array])
def test_values_schedule(kind):
    schedule = lb.values_schedule(kind([3.0, 2.0, 1.0]))
    assert_array_equal(over(schedule, 5), [3.0, 2.0, 1.0, 1.0, 1.0])


SCHEDULES = {
    "values": lb.values_schedule([0.3, 0.2, 0.1]),
    "large_batch_warmup": lb.large_batch_warmup(0.1, batch_scale=4, warmup_steps=3),
    "decay": lb.warmup_decay(0.1, total_steps=5, warmup_steps=1, hold_steps=1),
    "power": lb.warmup_decay(0.1, total_steps=5, decay="power", power=0.4),
    "drops": lb.warmup_drops(0.1, drop_steps=[3], warmup_steps=1),
    "inverse_sqrt": lb.warmup_inverse_sqrt(0.1, warmup_steps=2),
    "eden": lb.eden(0.1, lr_batches=3, lr_epochs=2, steps_per_epoch=2),
    "eden2": lb.eden2(0.1, lr_batches=3),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_is_an_optax_schedule(name):
    """Scalars of one dtype from a traced, a concrete and a Python step."""
    schedule = SCHEDULES[name]
    for step in (2, np.int32(2), jnp.asarray(2, "int32")):
        value = schedule(step)
        assert value.shape == ()
        assert value.dtype == jnp.float32
        assert_allclose(value, jax.jit(schedule)(step), rtol=1e-6)
    joined = optax.join_schedules([schedule, optax.constant_schedule(7.0)], [2])
    assert_allclose(joined(1), schedule(1), rtol=1e-6)


def decay(**settings):
    return lambda: lb.warmup_decay(0.1, **{"total_steps": 9} | settings)


@pytest.mark.parametrize(
    ("build", "error", "says"),
    [
        (lambda: lb.values_schedule([[1.0], [2.0]]), ValueError, "(2, 1)"),
        (decay(warmup_steps=10), ValueError, "10 (warm-up and hold) or more, got 9"),
        (decay(warmup_steps=5, hold_steps=5), ValueError, "10 (warm-up and hold) or more, got 9"),
        (decay(decay="drops"), ValueError, "decay must be one of 'linear', 'cosine', 'sqrt'"),
        (decay(decay="polynomial"), ValueError, "power must be a number"),
        (decay(decay="cosine", power=2), ValueError, "got 2 for 'cosine'"),
        (decay(warmup_begin_step=1), ValueError, "begin_step"),
        (decay(decay_begin_step=1), ValueError, "decay_begin_step"),
        (decay(warmup_mode="constant"), TypeError, "optax.join_schedules"),
        (lambda: lb.warmup_drops(0.1, drop_steps=[0]), ValueError, "drop_steps[0]"),
        (lambda: lb.eden2(0.1, warmup_start=2.0), ValueError, "warmup_start"),
    ],
)
def test_wrong_arguments(build, error, says):
    """What the ranges of single arguments, in test_public_arguments.py, do not say."""
    with pytest.raises(error) as raised:
        build()
    assert says in str(raised.value)
