"""Numbers that nobody thought of: they are drawn for one tree, so that one step serves all."""

import functools

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.optimizers.registry import LONG, OPTIMIZERS

LEAVES = [
    ("float64", (2, 3)),
    ("float32", ()),
    ("float32", (1, 4)),
    ("bfloat16", (2, 3, 2)),
    ("float16", (3,)),
]
STEPS = 3

pytestmark = pytest.mark.usefixtures("x64")

MAGNITUDES = st.one_of(
    st.sampled_from([0.0, 1e-320, 1e-45, 1e-38, 1e-30, 1e-20, 6e-8, 1e-6, 1.0, 1e4, 1e7]),
    st.floats(-45, 7).map(lambda exponent: 10.0**exponent),
)
TOO_LARGE = st.sampled_from([1e20, 1e30])
"""Finite, but float32 does not hold their squares: a step may be 0 or a NaN, and no error.

So are the largest magnitudes above: some optimizers square gradient times parameter.
"""
FAULTS = st.sampled_from([np.nan, np.inf, -np.inf])
NUMBERS = {
    "learning_rate": st.sampled_from([0.0, 1e-8, 1e-3, 1.0, 10.0]),
    "weight_decay": st.sampled_from([0.0, 1e-8, 0.1, 10.0]),
    "b1": st.sampled_from([0.0, 0.5, 0.9, 0.999999]),
    "b2": st.sampled_from([0.9, 0.999, 0.999999]),
    "momentum": st.sampled_from([0.0, 0.9, 0.999999]),
    "eps": st.sampled_from([1e-18, 1e-8, 1e-6, 1.0]),
}
SCHEDULED = ("learning_rate", "weight_decay")
"""The arguments that may be schedules."""


def filled(dtype, shape, magnitude, pattern, fault=None, limit=6e4):
    """An array of finite numbers, but for the fault if there is one.

    The limit holds in float16, where large steps would soon take a parameter out of its range.
    """
    rng = np.random.default_rng(pattern)
    signs = rng.choice([-1.0, -0.5, 0.0, 0.5, 1.0], size=shape) if pattern else np.ones(shape)
    array = np.asarray(signs * min(magnitude, limit if dtype == "float16" else np.inf))
    if fault is not None and array.size:
        array.flat[0] = fault
    with np.errstate(over="ignore"):
        return array.astype(jnp.dtype(dtype))


@functools.cache
def compiled(name, schedules):
    """A few steps of an optimizer as a function of its numbers too.

    A number of more than one value is a schedule: the value of each step.
    """
    entry = OPTIMIZERS[name]
    lengths = {
        number: STEPS if schedules and number in SCHEDULED else 1
        for number in NUMBERS
        if number in entry.arguments and number not in entry.static_args
    }

    def run(numbers, params, gradients):
        arguments = {
            number: values[0] if lengths[number] == 1 else lambda step, values=values: values[step]
            for number, values in numbers.items()
        }
        optimizer = entry.make(**arguments)
        state = optimizer.init(params)

        def step(carry, gradients):
            params, state = carry
            updates, state = optimizer.update(gradients, state, params)
            return (optax.apply_updates(params, updates), state), updates

        (_, state), updates = jax.lax.scan(step, (params, state), gradients)
        return jax.tree.map(lambda x: x[-1], updates), state

    options = {"xla_backend_optimization_level": 0}
    return lengths, jax.jit(run, compiler_options=options)


def check(updates, state, params, finite):
    """Shapes and dtypes are kept, as a scan keeps the state's; finite numbers give no NaN."""
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    for update, param in zip(jax.tree.leaves(updates), jax.tree.leaves(params), strict=True):
        assert (update.shape, update.dtype) == (param.shape, param.dtype)
    if finite:
        nans = [
            jax.tree_util.keystr(path)
            for path, x in jax.tree.leaves_with_path((updates, state))
            if np.any(np.isnan(np.asarray(x, "float64")))
        ]
        assert not nans


def take_steps(name, schedules, data):
    lengths, run = compiled(name, schedules)
    numbers = {
        number: jnp.asarray(data.draw(st.tuples(*[NUMBERS[number]] * length), number))
        for number, length in lengths.items()
    }
    magnitudes = st.lists(MAGNITUDES, min_size=len(LEAVES), max_size=len(LEAVES))

    def tree(what, limit, fault=None, at=0):
        drawn = data.draw(magnitudes, what)
        pattern = data.draw(st.integers(0, 3))
        return [
            filled(*leaf, magnitude, pattern, fault if index == at else None, limit)
            for index, (leaf, magnitude) in enumerate(zip(LEAVES, drawn, strict=True))
        ]

    params = tree("parameters", 10)
    faults = [data.draw(st.none() | FAULTS | TOO_LARGE, "fault"), None, None]
    place = data.draw(st.integers(0, len(LEAVES) - 1), "where")
    # Three steps at a rate of 10 have to stay in the range of float16.
    gradients = [tree("gradients", 2e3, fault, place) for fault in faults]
    stacked = [np.stack(steps) for steps in zip(*gradients, strict=True)]
    updates, state = run(numbers, params, stacked)
    check(updates, state, params, faults[0] is None)


SETTINGS = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.generate],
}


def fuzz(name, schedules, cases):
    @settings(max_examples=cases, **SETTINGS)
    @given(data=st.data())
    def run(data):
        take_steps(name, schedules, data)

    run()


QUICK = [(name, False) for name in OPTIMIZERS if name not in LONG]


@pytest.mark.parametrize(("name", "schedules"), [*QUICK, ("lans", True)])
def test_fuzz(name, schedules):
    fuzz(name, schedules, 30)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("schedules", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ten_thousand_cases(name, schedules):
    fuzz(name, schedules, 600)
