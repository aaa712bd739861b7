"""Updates can be differentiated, as by those who learn the settings of an optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_largebatch as lb

OPTIMIZERS = {
    "lamb": lb.lamb(0.1, weight_decay=0.01),
    "lans": lb.lans(0.1, weight_decay=0.01),
    "lars": lb.lars(0.1, weight_decay=0.01),
    "eve": lb.eve(0.1),
}

SHAPES = {"few": (20, 7), "small": (5000,), "folded": (190, 173), "large": (2, 2**16)}
"""Leaves whose sums are taken in different ways where there is one CPU."""


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_by_the_gradient(name, x64):
    """Along a direction, against a difference quotient."""
    optimizer = OPTIMIZERS[name]
    keys = iter(jax.random.split(jax.random.key(0), 3 * len(SHAPES)))
    params, gradients, direction = (
        {name: jax.random.normal(next(keys), shape) for name, shape in SHAPES.items()}
        for _ in range(3)
    )
    # Near 0 a difference quotient is none of the derivative: the direction is the gradient's sign.
    gradients = jax.tree.map(lambda x: x + jnp.sign(x), gradients)
    _, state = optimizer.update(gradients, optimizer.init(params), params)

    def update(step):
        moved = jax.tree.map(lambda x, way: x + step * way, gradients, direction)
        return optimizer.update(moved, state, params)[0]

    zero, h = jnp.zeros([]), 1e-5
    _, derivative = jax.jit(lambda: jax.jvp(update, (zero,), (jnp.ones([]),)))()
    after, before = jax.jit(update)(zero + h), jax.jit(update)(zero - h)
    for leaf in SHAPES:
        quotient = (after[leaf] - before[leaf]) / (2 * h)
        scale = np.abs(quotient).max()
        np.testing.assert_allclose(derivative[leaf], quotient, rtol=0, atol=1e-5 * scale)
