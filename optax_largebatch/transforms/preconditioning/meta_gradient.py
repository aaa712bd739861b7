r"""The gradient of learned matrices: how the preconditioner of one block learns.

A block is an array with as many axes as there are matrices. The matrix of an axis is
:math:`n \times n`, or a vector of its diagonal where the axis is long.

The matrices :math:`L_k` of the axes turn a momentum :math:`m` into a direction
:math:`d = (\times)_k L_k m`. A direction is good when the next gradient :math:`h` points along it,
measured by the size of the gradients there:

.. math:: f(L) = \frac{\langle h, d \rangle}{\rho}, \qquad
    \rho^2 = \operatorname{mean}\left(d \cdot (\times)_k \hat C_k d\right),

with :math:`\hat C_k` the second moments of the gradient's slices across axis :math:`k`. The size
of :math:`L_k` does not matter to :math:`f`, so the gradient with respect to :math:`L_k` is
orthogonal to :math:`L_k`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_largebatch.norms import sum_of_squares
from optax_largebatch.numerics import quotient, root

Matrices = tuple[jax.Array, ...]
"""A matrix, or the vector of its diagonal, for each axis of a block."""


def product(matrices: Sequence[jax.Array], x: jax.Array, without: int | None = None) -> jax.Array:
    """`x` with the matrix of each axis applied along it, except the axis `without`."""
    for axis, matrix in enumerate(matrices):
        if axis == without:
            continue
        if matrix.ndim == 1:
            x = x * jnp.expand_dims(matrix, [other for other in range(x.ndim) if other != axis])
        else:
            applied = jnp.tensordot(matrix, x, axes=(1, axis), precision="highest")
            x = jnp.moveaxis(applied, 0, axis)
    return x


def slice_products(a: jax.Array, b: jax.Array, axis: int, like: jax.Array) -> jax.Array:
    """The inner products of the slices of `a` and `b` across an axis, or only the diagonal."""
    others = [other for other in range(a.ndim) if other != axis]
    if like.ndim == 1:
        return jnp.sum(a * b, axis=others)
    return jnp.tensordot(a, b, axes=(others, others), precision="highest")


def mean_diagonal(matrix: jax.Array) -> jax.Array:
    """The mean of the diagonal."""
    return jnp.mean(matrix if matrix.ndim == 1 else jnp.diagonal(matrix))


def meta_gradient(
    gradient: jax.Array, momentum: jax.Array, matrices: Matrices, covariances: Matrices
) -> tuple[Matrices, jax.Array]:
    """The gradient of `f` with respect to each of the matrices, and whether `f` is defined."""
    direction = product(matrices, momentum)
    scaled = [quotient(matrix, mean_diagonal(matrix)) for matrix in covariances]
    weighted = product(scaled, direction)
    rho_squared = jnp.mean(weighted * direction)
    defined = rho_squared > 0
    rho_squared = jnp.where(defined, rho_squared, 1)
    rho = root(rho_squared)
    value = jnp.sum(gradient * direction) / rho
    outer = gradient / rho - value / (gradient.size * rho_squared) * weighted
    slopes = (
        slice_products(outer, product(matrices, momentum, without=axis), axis, matrix)
        for axis, matrix in enumerate(matrices)
    )
    return tuple(slopes), defined


def ascended(matrix: jax.Array, slope: jax.Array, rate: Any) -> jax.Array:
    """The matrix after a step along its meta-gradient; symmetric, positive, mean diagonal 1.

    The step has the size `rate` relative to the matrix.
    """
    if matrix.ndim == 1:
        along = slope * matrix
        new = matrix * jnp.square(1 + rate * quotient(along, root(sum_of_squares(along))))
        return new / jnp.mean(new)
    along = jnp.matmul((slope + slope.T) / 2, matrix, precision="highest")
    step = rate * quotient(along, root(sum_of_squares(along)))
    identity = jnp.eye(len(matrix), dtype=matrix.dtype)
    factor = identity + step
    new = jnp.matmul(jnp.matmul(factor, matrix, precision="highest"), factor.T, precision="highest")
    new = (new + new.T) / (2 * mean_diagonal(new))
    # As large as the rounding errors, which could make the smallest eigenvalues negative.
    ridge = 4 * len(matrix) * float(jnp.finfo(matrix.dtype).eps)
    return (new + ridge * identity) / (1 + ridge)


def meta_update(
    gradient: jax.Array,
    momentum: jax.Array,
    matrices: Matrices,
    covariances: Matrices,
    rate: Any,
    decay: Any,
) -> tuple[Matrices, Matrices]:
    """The matrices and the second moments of slices after one update.

    Args:
        gradient: the gradient of a block.
        momentum: the momentum of the step before.
        matrices: the matrices of the axes.
        covariances: the second moments of the axes.
        rate: the relative size of the step.
        decay: decay rate of the second moments.

    Returns:
        The new matrices and second moments.
    """
    covariances = tuple(
        decay * matrix + slice_products(gradient, gradient, axis, matrix)
        for axis, matrix in enumerate(covariances)
    )
    # Neither size matters to a step of relative size, and products of their squares would overflow.
    direction = quotient(gradient, jnp.max(jnp.abs(gradient)))
    mean_direction = quotient(momentum, jnp.max(jnp.abs(momentum)))
    slopes, defined = meta_gradient(direction, mean_direction, matrices, covariances)
    learned = tuple(
        jnp.where(defined, ascended(matrix, slope, rate), matrix)
        for matrix, slope in zip(matrices, slopes, strict=True)
    )
    return learned, covariances
