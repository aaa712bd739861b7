"""Hyperparameters in the dtype of the parameters, which may be too short for them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_largebatch as lb
from tests.conftest import enable_x64
from tests.optimizers.registry import OPTIMIZERS

SHORT = ("bfloat16", "float16")


def tree(dtype):
    return {"kernel": jnp.ones((3, 2), dtype), "bias": jnp.ones(2, dtype)}


def injected(name, **options):
    entry = OPTIMIZERS[name]
    wrapped = optax.inject_hyperparams(entry.factory, static_args=entry.static_args, **options)
    return wrapped(**entry.kwargs)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_short_decay_rates_that_are_injected(name):
    """When it is traced, too, since a dtype is known then."""
    says = r"(b1|momentum|beta) must be .* of at least 32 bits, got .*16.*hyperparam_dtype=jnp.f"
    for dtype in SHORT:
        for init in (injected(name).init, jax.jit(injected(name).init)):
            with pytest.raises(ValueError, match=says):
                init(tree(dtype))


@pytest.mark.parametrize("dtype", SHORT)
def test_the_cure(dtype):
    params = tree(dtype)
    optimizer, expected = injected("lamb", hyperparam_dtype=jnp.float32), OPTIMIZERS["lamb"].make()
    state = optimizer.init(params)
    assert state.hyperparams["b2"] == np.float32(0.999)
    with jax.numpy_dtype_promotion("standard"):
        updates, state = jax.jit(optimizer.update)(params, state, params)
    same, _ = jax.jit(expected.update)(params, expected.init(params), params)
    assert state.hyperparams["b2"] == np.float32(0.999)
    jax.tree.map(np.testing.assert_array_equal, updates, same)


@pytest.mark.parametrize(
    ("build", "name"),
    [(lambda x: lb.scale_by_adam(b2=x), "b2"), (lambda x: lb.measure_noise_scale(x), "decay")],
)
@pytest.mark.parametrize("dtype", SHORT)
def test_any_short_decay_rate(build, name, dtype):
    with pytest.raises(ValueError, match=f"{name} must be .* got one of dtype {dtype}"):
        build(jnp.asarray(0.5, dtype))
    build(jnp.asarray(0.5, "float32"))


@pytest.mark.parametrize("dtype", SHORT)
def test_a_short_learning_rate_loses_digits_alone(dtype):
    lb.lamb(jnp.asarray(1e-3, dtype), weight_decay=jnp.asarray(0.1, dtype))


@pytest.mark.parametrize("value", [1e39, np.float64(1e300), 10**40])
def test_a_number_that_is_infinite_in_32_bits(value):
    """Without an error a schedule that decays to it would return a NaN."""
    with pytest.raises(ValueError, match=r"must be at most 3.4e\+38, got"):
        lb.warmup_decay(0.1, total_steps=8, end_value=value)
    with enable_x64(True):
        assert lb.warmup_decay(1e300, total_steps=8)(0) == 1e300
