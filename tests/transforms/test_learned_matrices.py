"""The learned matrices: which blocks have them, and what they stay."""

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import optax
import pytest

import optax_largebatch as lb
from optax_largebatch.transforms.learned_matrices import (
    mean_diagonal,
    meta_gradient,
    product,
    scale_by_learned_matrices,
)


def state_of(shape, stacked=None, **settings):
    params = {"w": jnp.ones(shape)}
    stacks = lb.stacked_layers({"w": stacked}) if stacked is not None else None
    transform = scale_by_learned_matrices(0.1, stacked=stacks, **settings)
    return transform, transform.init(params)


@pytest.mark.parametrize(
    ("shape", "stacked", "expected"),
    [
        ((), None, []),
        ((2, 2), None, []),
        ((1, 6, 1), None, []),
        ((2, 3), None, [(2, 2), (3, 3)]),
        ((3, 1, 5, 2), None, [(3, 3), (5, 5), (2, 2)]),
        ((4, 9), None, [(4, 4), (9,)]),
        ((7, 2, 3), 0, [(7, 2, 2), (7, 3, 3)]),
        ((2, 7, 9), 1, [(7, 2, 2), (7, 9)]),
        ((7, 8), 0, []),
    ],
)
def test_the_shape_of_a_block_decides(shape, stacked, expected):
    _, state = state_of(shape, stacked, max_fullcov_size=8)
    assert [matrix.shape for matrix in state.matrices[0]] == expected
    assert [matrix.shape for matrix in state.covariances[0]] == expected
    for matrix in state.matrices[0]:
        full = matrix.shape[-1] <= 8
        same = np.eye(matrix.shape[-1]) if full else np.ones(matrix.shape[-1])
        assert_array_equal(matrix, np.broadcast_to(same, matrix.shape))


@pytest.mark.parametrize(
    ("settings", "bound"),
    [({}, 2.0), ({"max_step_scale": 2.0}, 2.0), ({"max_step_scale": 0.5}, 0.5),
     ({"max_step_scale": 3.0}, 3.0), ({"max_step_scale": 5.0}, 4.0)],
)  # fmt: skip
def test_no_step_is_larger_than_the_bound(settings, bound):
    params = {"w": jnp.ones((4, 4))}
    transform, state = state_of((4, 4), b1=0.0, **settings)
    gradient = {"w": jnp.zeros((4, 4)).at[0, 0].set(1.0)}  # of rms 1/4
    updates, _ = transform.update(gradient, state, params)
    assert_allclose(updates["w"][0, 0], bound, rtol=1e-6)


@pytest.mark.parametrize("wrong", [0.0, -1.0, np.nan, "2", None])
def test_a_bound_that_is_none(wrong):
    with pytest.raises((TypeError, ValueError), match=r"max_step_scale must be .*in \(0, inf\)"):
        state_of((4, 4), max_step_scale=wrong)


def losses_and_matrices(rate, steps):
    """A badly scaled regression, and every matrix on the way."""
    random = np.random.default_rng(0)
    inputs = random.normal(size=(256, 12)) * np.geomspace(0.05, 5, 12)
    inputs = jnp.asarray(inputs, "float32")
    params, wanted = (jnp.asarray(random.normal(size=(12, 9)), "float32") for _ in range(2))
    optimizer = lb.learned_gradient(rate, lr_est_period=2, max_fullcov_size=10)

    def loss(params, batch):
        return jnp.mean(jnp.square(batch @ (params - wanted)))

    def step(carry, index):
        params, state = carry
        batch = jax.lax.dynamic_slice_in_dim(inputs, 16 * (index % 16), 16)
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        (matrices,) = optax.tree.get(state, "matrices")
        return (optax.apply_updates(params, updates), state), (value, matrices)

    run = jax.jit(lambda carry: jax.lax.scan(step, carry, jnp.arange(steps))[1])
    return run((params, optimizer.init(params)))


@pytest.mark.parametrize("rate", [0.03, 0.3])
def test_matrices_stay_symmetric_and_positive_definite(rate):
    losses, (diagonal, full) = losses_and_matrices(rate, 3000)
    assert np.isfinite(losses).all()
    assert_array_equal(full, np.swapaxes(full, 1, 2))
    assert np.linalg.eigvalsh(full[::25]).min() > 0
    assert np.linalg.eigvalsh(full[-1]).min() < 0.5  # they did learn
    assert diagonal.shape == (3000, 12)
    assert np.min(diagonal) > 0
    assert_allclose(np.mean(diagonal, axis=1), 1, rtol=1e-5)
    assert_allclose(np.trace(full, axis1=1, axis2=2) / 9, 1, rtol=1e-5)


def test_a_step_of_zero_learns_nothing():
    _, (diagonal, full) = losses_and_matrices(0.0, 20)
    assert_allclose(full[-1], np.eye(9), atol=1e-6)
    assert_allclose(diagonal[-1], 1, atol=1e-6)


def agreement(matrices, gradient, momentum, covariances):
    """`f` of the docstring of `learned_gradient`."""
    direction = product(matrices, momentum)
    scaled = [matrix / mean_diagonal(matrix) for matrix in covariances]
    return jnp.vdot(gradient, direction) / jnp.sqrt(
        jnp.mean(direction * product(scaled, direction))
    )


def test_they_go_uphill_on_the_agreement(x64):
    """With a matrix for two axes of a block, and a diagonal for the third."""
    random = np.random.default_rng(0)
    gradient, momentum = jnp.asarray(random.normal(size=(2, 4, 3, 5)))
    roots = [random.normal(size=(size, size + 2)) for size in gradient.shape]
    *full, last = [root @ root.T for root in roots]
    matrices = [jnp.asarray(x / mean_diagonal(x)) for x in (*full, np.diagonal(last))]
    covariances = [jnp.sqrt(jnp.abs(matrix)) for matrix in matrices]
    slopes, defined = meta_gradient(gradient, momentum, matrices, covariances)
    assert defined
    expected = jax.grad(agreement)(matrices, gradient, momentum, covariances)
    for ours, theirs in zip(slopes, expected, strict=True):
        assert_allclose(ours, theirs, rtol=1e-10, atol=1e-10 * np.abs(theirs).max())
