"""Quantiles of Student's t, against tables."""

import jax
import jax.numpy as jnp
import pytest

from optax_largebatch.diagnostics.noise_scale import student_quantile

TABLE = {
    (0.8, 1): 1.37638,
    (0.8, 40): 0.85070,
    (0.95, 1): 6.31375,
    (0.95, 1.5): 3.70518,
    (0.95, 2): 2.91999,
    (0.95, 5): 2.01505,
    (0.95, 40): 1.68385,
    (0.95, 57): 1.67203,
    (0.95, 58): 1.67155,
    (0.95, 1e6): 1.64485,
    (0.995, 5): 4.03214,
}


@pytest.mark.parametrize(("probability", "freedom"), TABLE)
def test_quantiles(probability, freedom, both_precisions):
    known = TABLE[probability, freedom]
    assert student_quantile(probability, freedom) == pytest.approx(known, rel=2e-5)
    assert student_quantile(1 - probability, freedom) == pytest.approx(-known, rel=2e-5)


def test_under_jit_and_vmap():
    own = jax.jit(jax.vmap(lambda nu: student_quantile(0.95, nu)))(jnp.array([1.0, 2.0, 40.0]))
    assert own.tolist() == pytest.approx([6.31375, 2.91999, 1.68385], rel=2e-5)
