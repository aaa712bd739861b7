"""Newton-Schulz iterations: the orthogonal factor of a matrix, by products of matrices alone."""

from typing import Literal

import jax
import jax.numpy as jnp

from optax_largebatch.engine.matrices.groups import ALONE, DeviceGroup
from optax_largebatch.norms import cast, sum_of_squares
from optax_largebatch.numerics import positive, root
from optax_largebatch.transforms.orthogonalization.coefficients import Coefficients

Preconditioning = Literal["frobenius", "spectral", "aol", "schatten"]
"""What a matrix is divided by first, so that its singular values are 1 or less."""


def newton_schulz(
    matrix: jax.Array,
    eps: jax.Array,
    coefficients: Coefficients,
    preconditioning: Preconditioning,
    eps_is_floor: bool,
    group: DeviceGroup = ALONE,
) -> jax.Array:
    """The matrix with all its singular values near 1.

    Args:
        matrix: two axes.
        eps: what the norm that the matrix is divided by is made safe with; as precise as it.
        coefficients: three numbers for each iteration.
        preconditioning: what the matrix is divided by before the iterations.
        eps_is_floor: whether `eps` is the least divisor, and is not added.
        group: devices that share the matrix, which lies on its long side; each has some columns.
    """
    if preconditioning == "spectral":
        norm = _spectral_norm(matrix)
    else:
        norm = root(group.sum(sum_of_squares(matrix))).astype(eps.dtype)
    x = matrix / positive(jnp.maximum(norm, eps) if eps_is_floor else norm + eps)
    # The smaller of the two products is enough.
    is_high = group.size == 1 and x.shape[0] > x.shape[1]
    gram = x.conj().T @ x if is_high else group.sum(x @ x.conj().T)
    if preconditioning in ("aol", "schatten"):
        sums_of_rows = jnp.sum(jnp.abs(gram), axis=-1)
        divisor = sums_of_rows if preconditioning == "aol" else _frobenius_norm(gram)
        # The matrix was divided by its norm first, or its product would vanish where it is small.
        scale = jnp.broadcast_to(jax.lax.rsqrt(positive(divisor)), gram.shape[:1])
        x = x * (scale[None, :] if is_high else scale[:, None])
        gram = gram * scale[:, None] * scale[None, :]
    for k, (a, b, c) in enumerate(coefficients):
        if k:
            gram = x.conj().T @ x if is_high else group.sum(x @ x.conj().T)
        rows = group.rows(gram)
        factor = group.gathered(b * rows + c * rows @ gram)
        x = a * x + (x @ factor if is_high else factor @ x)
    return x


def _frobenius_norm(x: jax.Array) -> jax.Array:
    return root(sum_of_squares(x)).astype(x.real.dtype)


def _spectral_norm(x: jax.Array) -> jax.Array:
    """The largest singular value."""
    return jnp.linalg.norm(cast(x), ord=2).astype(x.real.dtype)
