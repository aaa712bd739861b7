"""A schedule returns one real number; all else is an error that names the argument."""

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_largebatch as lb
from tests.optimizers.registry import OPTIMIZERS

PARAMS = {"kernel": jnp.ones((4, 3)), "gain": jnp.ones((4, 1))}

WRONG = {
    "an array": (jnp.array([0.1, 0.2, 0.3]), ValueError, r"scalar, got an array of shape \(3,\)"),
    "an array of one": (jnp.array([0.1]), ValueError, r"scalar, got an array of shape \(1,\)"),
    "None": (None, TypeError, "got None of type NoneType"),
    "complex": (0.1j, TypeError, "got 0.1j of type complex"),
    "a complex array": (jnp.asarray(0.1j), TypeError, "dtype complex"),
    "a boolean": (True, TypeError, "got True of type bool"),
    "negative": (-0.1, ValueError, r"\[0, .*got -0.1"),
    "a NaN": (float("nan"), ValueError, "got nan"),
}


def refuses(name, argument, kind, compile_or_not=lambda update: update):
    value, error, says = WRONG[kind]
    changes = {argument: lambda step: value}
    optimizer = OPTIMIZERS[name].make(**OPTIMIZERS[name].known(batch_scale=1), **changes)
    update = compile_or_not(optimizer.update)
    with pytest.raises(error, match=rf"{argument}: what the schedule returns .*{says}"):
        update(PARAMS, optimizer.init(PARAMS), PARAMS)


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        (name, argument)
        for name in OPTIMIZERS
        for argument in ("learning_rate", "weight_decay")
        if argument in OPTIMIZERS[name].arguments
    ],
)
def test_no_optimizer_takes_an_array(name, argument):
    """It gave every column its own rate, and parameters of width 1 another shape."""
    refuses(name, argument, "an array")


@pytest.mark.parametrize("compile_or_not", [lambda update: update, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("kind", WRONG)
def test_what_is_no_number_in_range(kind, compile_or_not):
    refuses("lamb", "learning_rate", kind, compile_or_not)


def test_of_a_group_and_in_a_corrected_step_size():
    groups = lb.param_groups({"params": lb.matching("gain"), "weight_decay": lambda step: None})
    for optimizer, argument in (
        (lb.lamb(0.1, groups=groups), "weight_decay"),
        (lb.lamb(lambda step: None, bias_correction="step_size"), "learning_rate"),
    ):
        with pytest.raises(TypeError, match=f"{argument}: what the schedule returns .* got None"):
            optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS)


WRONG_EVERY = {
    "None": (lambda step: None, TypeError, "every: .* got None"),
    "an array": (lambda step: jnp.array([2, 2]), ValueError, r"every: .* shape \(2,\)"),
    "zero": (lambda step: 0, ValueError, r"every: .* \[1, inf\), got 0"),
    "an array of zero": (lambda step: jnp.asarray(0), ValueError, r"every, .* got 0"),
    "a NaN": (lambda step: jnp.asarray(jnp.nan), ValueError, "every, .* got nan"),
    "falls below 1 later": (
        optax.linear_schedule(8.0, 0.0, 1000),
        ValueError,
        r"every, at the macro-batch 1024, must be in \[1, inf\), got 0",
    ),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", WRONG_EVERY)
def test_micro_batches_of_a_macro_batch(kind, compiled):
    every, error, says = WRONG_EVERY[kind]
    init = lb.accumulate_gradients(optax.sgd(1.0), every=every).init
    with pytest.raises(error, match=says):
        (jax.jit(init) if compiled else init)(PARAMS)


def test_a_step_that_is_not_compiled_looks_again():
    """`init` looks at some macro-batches only, and 3 is not among them."""
    every = lambda step: jnp.where(step == 3, 0, 1)  # noqa: E731
    optimizer = lb.accumulate_gradients(optax.sgd(1.0), every=every)
    state = optimizer.init(PARAMS)
    for _ in range(3):
        _, state = optimizer.update(PARAMS, state, PARAMS)
    with pytest.raises(ValueError, match="every, at the macro-batch 3, must be in"):
        optimizer.update(PARAMS, state, PARAMS)


def test_what_is_a_number_is_taken():
    """Python's, NumPy's and JAX's numbers, and the integers among them."""
    results = []
    for one in (1, 1.0, jnp.asarray(1), jnp.asarray(1.0), jnp.ones([], jnp.bfloat16)):
        optimizer = lb.lamb(lambda step, one=one: one)
        results.append(optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS)[0])
    for other in results[1:]:
        assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), results[0], other))
