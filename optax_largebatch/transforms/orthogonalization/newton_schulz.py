"""Newton-Schulz iterations: the orthogonal factor of a matrix, by products of matrices alone."""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from optax_largebatch.arguments import check_integer
from optax_largebatch.engine.matrices.groups import ALONE, Group
from optax_largebatch.norms import accumulation_dtype, sum_of_squares
from optax_largebatch.numerics import positive, root

Coefficients = tuple[tuple[float, float, float], ...]
"""The three coefficients of each iteration."""

PUBLISHED: dict[str, Coefficients] = {
    "standard": ((3.4445, -4.7750, 2.0315),),
    "dion": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    ),
}
"""Coefficients of Jordan, of Dion (arXiv 2504.05295) and of Polar Express (arXiv 2505.16932)."""


LARGEST = 1000
"""The bound on coefficients, and on iterations, which are compiled one after the other."""


Preconditioning = Literal["frobenius", "spectral", "aol", "schatten"]
"""What a matrix is divided by first, so that its singular values are 1 or less."""


def newton_schulz(
    matrix: jax.Array,
    eps: jax.Array,
    coefficients: Coefficients,
    preconditioning: Preconditioning,
    group: Group = ALONE,
) -> jax.Array:
    """The matrix with all its singular values near 1.

    Args:
        matrix: two axes.
        eps: added to the norm that the matrix is divided by; has the dtype of the matrix.
        coefficients: three numbers for each iteration.
        preconditioning: what the matrix is divided by before the iterations.
        group: devices that share the matrix, which lies on its long side; each has some columns.
    """
    if preconditioning == "spectral":
        norm = _spectral_norm(matrix)
    else:
        norm = root(group.sum(sum_of_squares(matrix))).astype(matrix.dtype)
    x = matrix / positive(norm + eps)
    # The smaller of the two products is enough.
    is_high = group.size == 1 and x.shape[0] > x.shape[1]
    gram = x.T @ x if is_high else group.sum(x @ x.T)
    if preconditioning in ("aol", "schatten"):
        own = _sums_of_rows(gram) if preconditioning == "aol" else _frobenius_norm(gram)
        # The matrix was divided by its norm first, or its product would vanish where it is small.
        scale = jnp.broadcast_to(jax.lax.rsqrt(positive(own)), gram.shape[:1])
        x = x * (scale[None, :] if is_high else scale[:, None])
        gram = gram * scale[:, None] * scale[None, :]
    for k, (a, b, c) in enumerate(coefficients):
        if k:
            gram = x.T @ x if is_high else group.sum(x @ x.T)
        rows = group.rows(gram)
        factor = group.gathered(b * rows + c * rows @ gram)
        x = a * x + (x @ factor if is_high else factor @ x)
    return x


def _frobenius_norm(x: jax.Array) -> jax.Array:
    return root(sum_of_squares(x)).astype(x.dtype)


def _spectral_norm(x: jax.Array) -> jax.Array:
    """The largest singular value."""
    wide = x.astype(accumulation_dtype(x.dtype))
    return jnp.linalg.norm(wide, ord=2).astype(x.dtype)


def _sums_of_rows(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.abs(x), axis=-1)


def checked_coefficients(ns_coeffs: Any, ns_steps: Any) -> Coefficients:
    """The coefficients of each iteration, from the arguments `ns_coeffs` and `ns_steps`.

    Raises:
        TypeError: `ns_steps` is no integer.
        ValueError: the coefficients are neither published ones, three numbers, nor a sequence of
            three numbers each.
    """
    allowed = (
        f"one of {', '.join(map(repr, PUBLISHED))}, three numbers for all iterations, or "
        "a sequence with three numbers for each iteration"
    )
    check_integer("ns_steps", ns_steps, at_least=1)
    if ns_steps > LARGEST:
        raise ValueError(f"ns_steps must be at most {LARGEST}, got {ns_steps}. 5 are usual.")
    if isinstance(ns_coeffs, str):
        if ns_coeffs not in PUBLISHED:
            raise ValueError(f"ns_coeffs must be {allowed}; got {ns_coeffs!r}.")
        published = PUBLISHED[ns_coeffs]
        return published * ns_steps if len(published) == 1 else published
    if _is_triple(ns_coeffs):
        return (_triple(ns_coeffs),) * ns_steps
    if isinstance(ns_coeffs, Sequence) and ns_coeffs and all(map(_is_triple, ns_coeffs)):
        return tuple(map(_triple, ns_coeffs))
    raise ValueError(
        f"ns_coeffs must be {allowed}; got {ns_coeffs!r}. They are Python numbers, known when the "
        "step is traced: with optax.inject_hyperparams name ns_coeffs in static_args."
    )


def _is_triple(node: Any) -> bool:
    return (
        isinstance(node, Sequence)
        and not isinstance(node, str)
        and len(node) == 3
        and all(isinstance(x, int | float | np.floating) and abs(x) <= LARGEST for x in node)
    )


def _triple(node: Any) -> tuple[float, float, float]:
    a, b, c = map(float, node)
    return a, b, c
