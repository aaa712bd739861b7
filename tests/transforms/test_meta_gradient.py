"""The gradient of learned matrices against `jax.grad` of what they go uphill on."""

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose
import pytest

from optax_largebatch.transforms.learned_matrices import (
    mean_diagonal,
    meta_gradient,
    product,
)

SHAPES = {
    "matrix": ((4, 3), ()),
    "cube with a diagonal": ((4, 3, 5), (2,)),
    "diagonals only": ((6, 7), (0, 1)),
}


def block(name):
    """Gradient, momentum, matrices and second moments; the matrices have a diagonal of mean 1."""
    shape, diagonal = SHAPES[name]
    random = np.random.default_rng(0)
    gradient, momentum = (jnp.asarray(random.normal(size=shape)) for _ in range(2))
    matrices = []
    for axis, size in enumerate(shape):
        root = random.normal(size=(size, size + 2))
        matrix = root @ root.T
        matrix = np.diagonal(matrix) if axis in diagonal else matrix
        matrices.append(jnp.asarray(matrix / mean_diagonal(matrix)))
    covariances = tuple(jnp.sqrt(jnp.abs(matrix)) for matrix in matrices)
    return gradient, momentum, tuple(matrices), covariances


def agreement(matrices, gradient, momentum, covariances):
    """`f` of the docstring."""
    direction = product(matrices, momentum)
    scaled = [matrix / mean_diagonal(matrix) for matrix in covariances]
    return jnp.vdot(gradient, direction) / jnp.sqrt(
        jnp.mean(direction * product(scaled, direction))
    )


@pytest.mark.parametrize("name", SHAPES)
def test_is_the_gradient_of_the_agreement(name, x64):
    gradient, momentum, matrices, covariances = block(name)
    slopes, defined = meta_gradient(gradient, momentum, matrices, covariances)
    expected = jax.grad(agreement)(matrices, gradient, momentum, covariances)
    assert bool(defined)
    for ours, theirs in zip(slopes, expected, strict=True):
        assert_allclose(ours, theirs, rtol=1e-10, atol=1e-10 * np.abs(theirs).max())
