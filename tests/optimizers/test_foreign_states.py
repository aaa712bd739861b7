"""A state that is not the optimizer's own is an error that says what it is and what to do."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_largebatch as lb
from tests.optimizers.registry import OPTIMIZERS, WRAPPERS

PARAMS = {"bias": jnp.ones(4), "kernel": jnp.ones((8, 4))}
CURE = "Call `init` of this optimizer"


def updated(optimizer, state, params=PARAMS):
    return jax.eval_shape(optimizer.update, params, state, params)


@pytest.mark.parametrize(
    ("name", "shape"),
    [*((name, (8, 1)) for name in OPTIMIZERS), *(("lamb", x) for x in ((1, 4), (4, 8), (2, 8, 4)))],
)
def test_moments_of_another_shape_would_broadcast(name, shape):
    """Each of the arrays like a parameter by itself."""
    optimizer = OPTIMIZERS[name].make()
    leaves, structure = jax.tree.flatten_with_path(optimizer.init(PARAMS))
    alike = [index for index, (_, leaf) in enumerate(leaves) if leaf.shape == (8, 4)]
    assert alike
    for index in alike:
        path, leaf = leaves[index]
        (field,) = [key.name for key in path if hasattr(key, "name")][-1:]
        others = [leaf for _, leaf in leaves]
        others[index] = jnp.zeros(shape, leaf.dtype)
        message = rf"the state's {field} has the shape {shape} for the parameter 'kernel' of shape"
        with pytest.raises(ValueError, match=re.escape(message)) as raised:
            updated(optimizer, structure.unflatten(others))
        assert CURE in str(raised.value)


NAMES = [*OPTIMIZERS]
PAIRS = [pair for k in (1, 5) for pair in zip(NAMES, NAMES[k:] + NAMES[:k], strict=True)]
PAIRS.remove(("lars", "larc"))  # the same but for a limit


@pytest.mark.parametrize(("own", "other"), PAIRS, ids=str)
def test_the_state_of_another_optimizer(own, other):
    optimizer = OPTIMIZERS[own].make()
    with pytest.raises(TypeError, match=r"state must be that of .*; got ") as raised:
        updated(optimizer, OPTIMIZERS[other].make().init(PARAMS))
    assert CURE in str(raised.value)


KEEPING = WRAPPERS | {
    "measure_noise_scale": lambda inner: lb.measure_noise_scale(),
    "chain": lambda inner: lb.chain(optax.identity(), inner),
}


@pytest.mark.parametrize("name", KEEPING)
def test_a_wrapper_names_itself(name):
    inner, itself = lb.lamb(0.1), name.split(",")[0]
    with pytest.raises(TypeError, match=f"state must be that of {itself}, which keeps "):
        updated(KEEPING[name](inner), inner.init(PARAMS))


@pytest.mark.parametrize("field", ["accumulator", "master"])
def test_arrays_of_wrappers_of_another_shape(field):
    params = optax.tree.cast(PARAMS, "bfloat16")
    optimizer = lb.master_weights(lb.accumulate_gradients(optax.sgd(0.1), every=2))
    state = optimizer.init(params)
    other = optax.tree.set(state, **{field: {"bias": jnp.ones(4), "kernel": jnp.ones((8, 1))}})
    with pytest.raises(ValueError, match=rf"the state's {field} has the shape \(8, 1\) for the"):
        updated(optimizer, other, params)


def test_copies_of_a_state():
    optimizer = lb.lamb(0.1)
    counted = optax.tree.set(optimizer.init(PARAMS), count=jnp.zeros(3, "int32"))
    with pytest.raises(ValueError, match=r"the state's count has the shape \(3,\), and not \(\)"):
        updated(optimizer, counted)


def test_another_window_of_norms():
    state = lb.clip_by_median_norm(2.0).init(PARAMS)
    optimizer = lb.clip_by_median_norm(2.0, window=50)
    with pytest.raises(ValueError, match=r"the state's norms has the shape \(100,\), and not \(50"):
        updated(optimizer, state)


def test_what_a_checkpoint_made_of_it():
    state = lb.scale_by_adam().init(PARAMS)
    with pytest.raises(TypeError, match=r"keeps ScaleByAdamState\(count, mu, nu\); got a dict. "):
        updated(lb.scale_by_adam(), state._asdict())
