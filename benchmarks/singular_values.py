"""The largest singular value that Newton-Schulz iterations leave, for each set of coefficients.

    python -m benchmarks.singular_values

The matrices are random, with singular values that fall exponentially from 1 to `LEAST`. Rounding
makes some of them larger than 1 on the way, and fast coefficients make these grow. Prints the table
of docs/algorithms/muon.md.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from optax_largebatch.transforms.orthogonalization.coefficients import PUBLISHED
from optax_largebatch.transforms.orthogonalization.newton_schulz import newton_schulz

DTYPES = ("float32", "bfloat16", "float16")
SHAPES = ((128, 128), (128, 512))
LEAST = (1e-1, 1e-3, 1e-6)


@functools.cache
def matrices() -> list[np.ndarray]:
    """Matrices with singular values that fall exponentially."""
    rng = np.random.default_rng(0)
    found = []
    for height, width in SHAPES:
        left, _ = np.linalg.qr(rng.normal(size=(height, height)))
        right, _ = np.linalg.qr(rng.normal(size=(width, height)))
        found += [(left * np.geomspace(1, least, height)) @ right.T for least in LEAST]
    return found


def largest(name: str, dtype: str) -> float:
    """The largest singular value after the iterations, over all matrices.

    Args:
        name: the coefficients.
        dtype: the dtype of the iterations.
    """
    preconditioning = "aol" if name == "aol" else "frobenius"
    iterate = jax.jit(
        functools.partial(
            newton_schulz,
            coefficients=PUBLISHED[name].of(None),
            preconditioning=preconditioning,
            eps_is_floor=False,
        )
    )
    results = (iterate(jnp.asarray(x, dtype), jnp.asarray(1e-7, dtype)) for x in matrices())
    return max(_norm(np.asarray(x, "float64")) for x in results)


def _norm(x: np.ndarray) -> float:
    """The largest singular value, for which no decomposition of the matrix is needed."""
    return float(np.sqrt(np.linalg.eigvalsh(x @ x.T)[-1]))


def shown(value: float) -> str:
    """The value as the table has it; where iterations diverge, its digits say nothing."""
    return f"{value:.2f}" if value < 10 else "diverges"


def main() -> None:
    """Prints the table."""
    print(f"| `ns_coeffs` | iterations | {' | '.join(DTYPES)} |")
    print("|---|---|---|---|---|")
    for name, own in PUBLISHED.items():
        values = " | ".join(shown(largest(name, dtype)) for dtype in DTYPES)
        print(f'| `"{name}"` | {own.steps} | {values} |')


if __name__ == "__main__":
    main()
