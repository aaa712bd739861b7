"""Newton-Schulz iterations: the orthogonal factor of a matrix, by products of matrices alone."""

from typing import Literal

import jax
import jax.numpy as jnp

from optax_largebatch.engine.matrices.groups import ALONE, DeviceGroup
from optax_largebatch.norms import cast, sum_of_squares
from optax_largebatch.numerics import positive, root
from optax_largebatch.transforms.orthogonalization.coefficients import Coefficients

START = 2.0**-4
"""The factor of the first matrix. The factor grows to about 30 in five iterations, so in the middle
of its way it is near 1, and entries in 16 bits are neither too small nor too large."""

FARTHEST = 2.0**7
"""How far the factor may move from 1."""

LEAST_ASPECT = 2
"""The long side over the short one, from which on Gram's form multiplies less."""

Preconditioning = Literal["frobenius", "spectral", "aol", "schatten"]
"""What a matrix is divided by first, so that its singular values are 1 or less."""


def newton_schulz(
    matrix: jax.Array,
    eps: jax.Array,
    coefficients: Coefficients,
    preconditioning: Preconditioning,
    eps_is_floor: bool,
    dtype: jax.typing.DTypeLike | None = None,
    gram_form: bool = False,
    group: DeviceGroup = ALONE,
) -> jax.Array:
    r"""The matrix with all its singular values near 1.

    In place of :math:`X_k` it keeps :math:`x_k = X_k / s_k` with a number :math:`s_k`. With
    :math:`(a, b, c)` of an iteration,

    .. math::

        H = \frac{b s_k^2}{a} x_k x_k^\top, \qquad
        x_{k+1} = x_k + \left(H + \frac{a c}{b^2} H H\right) x_k, \qquad
        s_{k+1} = a s_k

    are the same matrices, but all factors stand before products, where they cost a GPU nothing. In
    bfloat16 the error is a fifth less.

    Gram's form takes two iterations at once. With :math:`P_k` for what stands in the brackets,

    .. math::

        x_{k+2} = x_k + (P_k + P_{k+1} + P_{k+1} P_k) x_k, \qquad
        x_{k+1} x_{k+1}^\top = (1 + P_k) x_k x_k^\top (1 + P_k)

    so that every second iteration has products of the short side alone. Over many iterations their
    rounding adds up until nothing is right, so no more than two go together: then 16 bits are about
    as close as in the usual form. The first is alone, because a pair that began with it would
    diverge in bfloat16 for coefficients without a safety factor (`"cans"`).

    Args:
        matrix: two axes.
        eps: what the norm that the matrix is divided by is made safe with; as precise as it.
        coefficients: three numbers for each iteration.
        preconditioning: what the matrix is divided by before the iterations.
        eps_is_floor: whether `eps` is the least divisor, and is not added.
        dtype: in which the iterations run, after the division; None for that of the matrix.
        gram_form: whether Gram's form is taken, for a matrix with a side at least twice as long as
            the other that no group of devices shares.
        group: devices that share the matrix, which lies on its long side; each has some columns.
    """
    if preconditioning == "spectral":
        norm = jnp.linalg.norm(cast(matrix), ord=2)  # the largest singular value
    else:
        norm = root(group.sum(sum_of_squares(matrix)))
    norm = norm.astype(eps.dtype)
    divisor = positive(jnp.maximum(norm, eps) if eps_is_floor else norm + eps)
    x = cast(matrix / (START * divisor), dtype or matrix.dtype)
    is_high = group.size == 1 and x.shape[0] > x.shape[1]

    def product(x: jax.Array) -> jax.Array:
        """The smaller of the products with the transpose, which is enough."""
        return x.conj().T @ x if is_high else group.sum(x @ x.conj().T)

    gram = product(x)
    if preconditioning in ("aol", "schatten"):
        if preconditioning == "aol":
            divisor = jnp.sum(jnp.abs(gram), axis=-1)
        else:
            divisor = root(sum_of_squares(gram)).astype(gram.real.dtype)
        # The matrix was divided by its norm first, or its product would vanish where it is small.
        inverse = jax.lax.rsqrt(positive(divisor)) / START
        inverse = jnp.broadcast_to(inverse, gram.shape[:1])
        x = x * (inverse[None, :] if is_high else inverse[:, None])
        gram = gram * inverse[:, None] * inverse[None, :]
    is_long = max(x.shape) >= LEAST_ASPECT * min(x.shape)
    takes_pairs = gram_form and is_long and group.size == 1
    scale = START
    first = None
    for k, (a, b, c) in enumerate(coefficients):
        h = (b * scale**2 / a) * gram
        rows = group.rows(h)
        square = (a * c / b**2) * (rows @ h) if c else 0.0
        factor = group.gathered(rows + square)
        scale *= a
        begins_pair = takes_pairs and k % 2 == 1 and k + 1 < len(coefficients)
        if begins_pair:
            first = factor
            half = gram + factor @ gram
            gram = half + half @ factor
            continue
        if first is not None:
            # In the other order the rounding of two products that nearly commute would not cancel.
            both = first @ factor if is_high else factor @ first
            factor = first + factor + both
            first = None
        x = x + (x @ factor if is_high else factor @ x)
        if not 1 / FARTHEST < abs(scale) < FARTHEST:
            x = scale * x
            scale = 1.0
        if k + 1 < len(coefficients):
            gram = product(x)
    return (scale * x).astype(matrix.dtype)
