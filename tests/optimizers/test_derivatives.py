"""Updates can be differentiated, as by those who learn the settings of an optimizer.

Also where an element of the gradient is exactly 0, as of an unused embedding: there the second
moment is 0, and the slope of its root infinite.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_largebatch as lb
from tests.conftest import slow_but
from tests.helpers import drawn, first_step

PARAMS = {
    "bias": np.array([0.3, -0.2, 0.1]),
    "embedding": np.linspace(-1.0, 2.0, 12).reshape(4, 3),
    "gain": np.array(0.5),
}
GRADIENTS = jax.tree.map(np.cos, PARAMS)
GRADIENTS["embedding"][1, 2] = 0.0
NO_BIAS = GRADIENTS | {"bias": np.zeros(3)}
NOTHING = jax.tree.map(np.zeros_like, PARAMS)

OPTIMIZERS = {
    "lamb": lb.lamb(0.1, weight_decay=0.01),
    "lamb, clipped": lb.lamb(0.1, max_grad_norm=0.5),
    "lamb, not clipped": lb.lamb(0.1, max_grad_norm=1e9),
    "lans": lb.lans(0.1, weight_decay=0.01),
    "lans, sequential": lb.lans(0.1, order="sequential"),
    "lars": lb.lars(0.1, weight_decay=0.01),
    "lbsgd": lb.lbsgd(0.1, weight_decay=0.01, warmup_strategy="lars"),
    "eve": lb.eve(0.1, eps=1e-6),
    "scaled_adam": lb.scaled_adam(0.1, eps=1e-6, clipping_scale=2.0),
    "cain": lb.cain(0.1, eps=1e-6),
}
QUICK = ("lamb, clipped", "lans", "eve")
NAMES = slow_but(QUICK, OPTIMIZERS)

pytestmark = pytest.mark.usefixtures("x64")


def assert_is_the_quotient(along, h, tolerance, least=0.0):
    """The derivative of a function of a number, at 0."""
    zero = jnp.zeros([])
    derivative = jax.jit(lambda: jax.jvp(along, (zero,), (zero + 1,))[1])()
    after, before = jax.jit(along)(zero + h), jax.jit(along)(zero - h)
    for leaf, found in derivative.items():
        quotient = (after[leaf] - before[leaf]) / (2 * h)
        scale = max(np.abs(quotient).max(), least)
        np.testing.assert_allclose(found, quotient, rtol=0, atol=tolerance * scale)


SHAPES = {"few": (20, 7), "small": (5000,), "folded": (190, 173), "large": (2, 2**16)}
"""Leaves whose sums are taken in different ways where there is one CPU."""


@pytest.mark.parametrize("name", slow_but(("lamb",), ["lamb", "lans", "lars", "eve"]))
def test_by_the_gradient(name):
    """Along a direction. Near 0 a difference quotient is none of the derivative: it is avoided."""
    optimizer = OPTIMIZERS[name]
    params, gradients, direction = (drawn(SHAPES, float, seed) for seed in range(3))
    gradients = jax.tree.map(lambda x: x + jnp.sign(x), gradients)
    _, state = first_step(optimizer, gradients, params)

    def along(step):
        moved = jax.tree.map(lambda x, way: x + step * way, gradients, direction)
        return optimizer.update(moved, state, params)[0]

    assert_is_the_quotient(along, 1e-5, tolerance=1e-5)


def updates(name, before=()):
    """The updates as a function of the gradients, after steps with some others."""
    optimizer = OPTIMIZERS[name]
    params = jax.tree.map(jnp.asarray, PARAMS)
    state = optimizer.init(params)
    for gradients in before:
        _, state = optimizer.update(gradients, state, params)
    return lambda gradients: optimizer.update(gradients, state, params)[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("before", [(), (GRADIENTS,)], ids=["first step", "second step"])
def test_agrees_with_a_difference_quotient(name, before):
    """The quotient is taken on a scale that is small beside epsilon."""
    function, h = updates(name, before), 1e-10

    def along(t):
        return function(jax.tree.map(lambda g: g + t * (1 + jnp.cos(3 * g)), GRADIENTS))

    assert_is_the_quotient(along, h, tolerance=1e-3, least=1e-2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gradients", [NO_BIAS, NOTHING], ids=["leaf", "all"])
def test_is_finite_backwards(name, gradients):
    function = updates(name)
    weighted = lambda g: sum(jnp.vdot(u, jnp.cos(u)) for u in jax.tree.leaves(function(g)))  # noqa: E731
    derivative = jax.jit(jax.grad(weighted))(jax.tree.map(jnp.asarray, gradients))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(derivative))
