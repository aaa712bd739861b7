"""The gradient of learned matrices against `jax.grad` of what they go uphill on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_largebatch.transforms.learned_matrices import (
    ascended,
    mean_diagonal,
    meta_gradient,
    meta_update,
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


def test_product_is_that_of_every_axis(x64):
    _, momentum, (a, b, diagonal), _ = block("cube with a diagonal")
    expected = np.einsum("ai,bj,k,ijk->abk", a, b, diagonal, momentum)
    np.testing.assert_allclose(product((a, b, diagonal), momentum), expected, rtol=1e-12)
    expected = np.einsum("ai,k,ijk->ajk", a, diagonal, momentum)
    np.testing.assert_allclose(product((a, b, diagonal), momentum, without=1), expected, rtol=1e-12)


@pytest.mark.parametrize("name", SHAPES)
def test_is_the_gradient_of_the_agreement(name, x64):
    gradient, momentum, matrices, covariances = block(name)
    slopes, defined = meta_gradient(gradient, momentum, matrices, covariances)
    expected = jax.grad(agreement)(matrices, gradient, momentum, covariances)
    assert bool(defined)
    for ours, theirs in zip(slopes, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-10 * np.abs(theirs).max())


@pytest.mark.parametrize("name", SHAPES)
def test_is_orthogonal_to_the_matrices(name, x64):
    """A larger matrix would not point any better."""
    gradient, momentum, matrices, covariances = block(name)
    slopes, _ = meta_gradient(gradient, momentum, matrices, covariances)
    for slope, matrix in zip(slopes, matrices, strict=True):
        scale = np.linalg.norm(slope) * np.linalg.norm(matrix)
        assert scale > 0.1
        assert abs(jnp.vdot(slope, matrix)) < 1e-12 * scale


@pytest.mark.parametrize("name", SHAPES)
def test_a_small_step_goes_uphill(name, x64):
    gradient, momentum, matrices, covariances = block(name)
    slopes, _ = meta_gradient(gradient, momentum, matrices, covariances)
    before = agreement(matrices, gradient, momentum, covariances)
    for axis, slope in enumerate(slopes):
        moved = list(matrices)
        moved[axis] = ascended(matrices[axis], slope, 1e-3)
        assert agreement(moved, gradient, momentum, covariances) > before
        np.testing.assert_allclose(mean_diagonal(moved[axis]), 1, rtol=1e-12)
        np.testing.assert_array_equal(moved[axis], moved[axis].T)


def test_without_a_momentum_the_matrices_stay(x64):
    gradient, momentum, matrices, covariances = block("cube with a diagonal")
    learned, seen = meta_update(gradient, 0 * momentum, matrices, covariances, 0.1, 0.9)
    for ours, before in zip(learned, matrices, strict=True):
        np.testing.assert_array_equal(ours, before)
    unfolded = np.moveaxis(np.asarray(gradient), 1, 0).reshape(3, -1)
    np.testing.assert_allclose(seen[1], 0.9 * covariances[1] + unfolded @ unfolded.T, rtol=1e-12)
    np.testing.assert_allclose(
        seen[2], 0.9 * covariances[2] + np.sum(np.square(gradient), (0, 1)), rtol=1e-12
    )
