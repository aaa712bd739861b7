"""Branched runs: the steps they take, and the critical batch size that they show."""

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import optax
import pytest

import optax_largebatch as lb

CURVATURE = np.geomspace(0.02, 1.0, 400)
BATCHES = (4, 16, 64, 256, 1024)


TARGET = 0.025 * CURVATURE.sum()


def expected_losses(rate, batch):
    """After each of 400 steps."""
    shrink = (1 - rate * CURVATURE) ** 2
    floor = rate**2 * CURVATURE / batch / (1 - shrink)
    steps = np.arange(400)[:, None]
    return 0.5 * (shrink**steps * (1 - floor) + floor) @ CURVATURE


def exact_steps(batch):
    """The least steps in which the expected loss falls to the target, over all rates."""
    curves = [expected_losses(rate, batch) for rate in np.geomspace(0.05, 1.99, 300)]
    return min(arrival(own, range(400), TARGET, smoothing=0) for own in curves)


def least_examples():
    times = np.geomspace(1, 1000, 4000)
    decayed = np.exp(-2 * np.outer(times, CURVATURE))
    room = TARGET - 0.5 * decayed @ CURVATURE
    noise = 0.25 * (1 - decayed) @ CURVATURE
    return np.min((times * noise / room)[room > 0])


def quadratic(w):
    return 0.5 * jnp.sum(jnp.asarray(CURVATURE, w.dtype) * w**2)


def noisy_quadratic(w, key, batch_size):
    """The loss of a batch whose gradient has the curvature as its covariance."""
    deviation = jnp.sqrt(jnp.asarray(CURVATURE, w.dtype) / batch_size)
    return quadratic(w) + jax.random.normal(key, w.shape) * deviation @ w


@pytest.mark.slow
def test_critical_batch_size_of_a_noisy_quadratic():
    r"""SGD with the best constant rate on a quadratic: theory against the measurement.

    :math:`L(w) = \frac12 \sum_i h_i w_i^2` from :math:`w_i = 1`, and the gradient of a batch is
    :math:`h_i w_i + \xi_i` with :math:`\mathrm{Var}\, \xi_i = h_i / B` (the covariance is the
    curvature, as in linear regression). A step :math:`w_i \leftarrow w_i - \eta (h_i w_i + \xi_i)`
    takes the second moment :math:`m_i = E w_i^2` to :math:`(1 - \eta h_i)^2 m_i + \eta^2 h_i / B`,
    so with :math:`a_i = (1 - \eta h_i)^2` and :math:`f_i = \eta^2 h_i / (B (1 - a_i))`

    .. math:: E L_t = \frac12 \sum_i h_i \left(a_i^t (1 - f_i) + f_i\right).

    No step is taken at random here: :math:`S(B)` is the least :math:`t` over all :math:`\eta` at
    which that is the target. Its limits are those of :math:`S_{min} (1 + B_{crit} / B)`, so
    :math:`B_{crit} = E_{min} / S_{min}` where

    - :math:`S_{min} = \lim_{B \to \infty} S(B)`: the formula without noise, :math:`f_i = 0`;
    - :math:`E_{min} = \lim_{B \to 0} B\, S(B)`: rates are small then, and with the time
      :math:`\tau = \eta t` and :math:`\rho = \eta / B` the loss becomes
      :math:`\frac12 \sum_i h_i e^{-2 h_i \tau} + \frac{\rho}{4} \sum_i h_i (1 - e^{-2 h_i \tau})`
      (:math:`f_i \to \rho / 2`). It is the target at one :math:`\rho(\tau)`, and the examples are
      :math:`B t = \tau / \rho(\tau)`, least at the best :math:`\tau`.

    Nothing of the fit is in it.
    """
    measured = lb.measure_critical_batch_size(
        jnp.ones(400), noisy_quadratic, optax.sgd,
        batch_sizes=BATCHES, learning_rates=np.geomspace(0.15, 1.85, 16).tolist(),
        evaluate=quadratic, target=TARGET, max_steps=1000, runs=4,
    )  # fmt: skip
    critical, (low, high) = measured.fit.critical_batch_size, measured.fit.interval
    assert_allclose(critical, least_examples() / exact_steps(np.inf), rtol=0.2)
    assert_allclose(measured.best_steps.mean(axis=1), [*map(exact_steps, BATCHES)], rtol=0.1)
    assert not any(measured.at_edge)
    assert low < critical < high < 1.3 * low


def slope(params, key, batch_size):
    """A loss without noise, which every batch size takes down alike."""
    del key, batch_size
    return bowl(params)


def bowl(params):
    return 0.5 * jnp.sum(jnp.asarray([1.0, 0.1]) * params**2)


START = jnp.asarray([3.0, 2.0])


def measured_on_the_bowl(make_optimizer=optax.sgd, params=START, **changes):
    settings = {
        "batch_sizes": (1, 2, 4), "learning_rates": (0.5, 0.6, 1.2, 2.5), "evaluate": bowl,
        "target": 0.02, "max_steps": 200, "runs": 1, "smoothing": 0.0,
    }  # fmt: skip
    return lb.measure_critical_batch_size(params, slope, make_optimizer, **(settings | changes))


def arrival(losses, steps, target, smoothing):
    """The crossing of the smoothed curve, written down once more."""
    mean, when = losses[0], 0.0
    for n in range(1, len(losses)):
        alpha = min(1.0, 1.0 / (smoothing * n)) if smoothing else 1.0
        before = (when, mean)
        mean, when = (1 - alpha) * mean + alpha * losses[n], (1 - alpha) * when + alpha * steps[n]
        if mean <= target:
            return np.interp(target, [mean, before[1]], [when, before[0]])
    return np.inf


@pytest.mark.parametrize(("every", "smoothing"), [(1, 0.0), (3, 0.0), (2, 0.5)])
def test_counts_the_steps_to_the_target(every, smoothing):
    measured = measured_on_the_bowl(evaluate_every=every, smoothing=smoothing)
    w, curvature = np.array([3.0, 2.0]), np.array([1.0, 0.1])
    steps = np.arange(0, 200, every)
    for index, rate in enumerate((0.5, 0.6, 1.2)):
        path = [0.5 * np.sum(curvature * ((1 - rate * curvature) ** t * w) ** 2) for t in steps]
        expected = arrival(path, steps, 0.02, smoothing)
        assert_allclose(measured.steps[:, index, 0], expected, rtol=1e-4)
    assert np.all(np.isinf(measured.steps[:, 3]))  # 1 - 2.5 h < -1: diverges
    assert measured.steps.shape == (3, 4, 1)
    assert measured.best_learning_rates == (1.2, 1.2, 1.2)
    assert measured.at_edge == (False, False, False)


def test_a_loss_that_is_minus_infinity_has_diverged():
    def falls_off(params):
        return jnp.where(bowl(params) > 50, -jnp.inf, bowl(params))

    measured = measured_on_the_bowl(evaluate=falls_off)
    assert np.all(np.isinf(measured.steps[:, 3]))
    assert np.all(np.isfinite(measured.steps[:, :3]))


def test_the_best_rate_is_that_of_the_mean_and_edges_are_flagged():
    steps = np.array(
        [
            [[9.0, 9.0], [4.0, 12.0], [3.0, np.inf]],
            [[7.0, 7.0], [6.0, 9.0], [9.0, 5.0]],
            [[9.0, 9.0], [9.0, 9.0], [3.0, 4.0]],
        ]
    )
    measured = lb.MeasuredCriticalBatchSize((8, 16, 32), (0.1, 0.2, 0.4), steps)
    assert measured.best_learning_rates == (0.2, 0.1, 0.4)
    assert_array_equal(measured.best_steps, [[4, 12], [7, 7], [3, 4]])
    assert measured.at_edge == (False, True, True)
    first, second, _ = measured.summary().split("\n")
    assert first == "batch size 8: 8 steps at the learning rate 0.2"
    assert second.endswith("7 steps at the learning rate 0.1, the edge of the grid: add rates "
                           "beyond it")  # fmt: skip
    same = lb.fit_critical_batch_size((8, 16, 32), [[4, 12], [7, 7], [3, 4]])
    assert measured.fit == same


def test_gives_up_what_is_four_times_slower():
    """The rate 0.02 takes 128 steps; the others are not held up by it."""
    rates = (0.02, 0.5, 1.0)
    steep = measured_on_the_bowl(target=0.3, learning_rates=rates)
    assert np.all(np.isinf(steep.steps[:, 0]))
    alone = measured_on_the_bowl(target=0.3, learning_rates=(0.01, 0.02))
    assert np.all(np.isfinite(alone.steps[:, 1]))


def test_goes_on_from_a_training_state():
    """Ten steps with momentum and a schedule, and then the same run from there."""

    def optimizer(rate):
        return optax.sgd(optax.exponential_decay(rate, 5, 0.9), momentum=0.5)

    params, state = START, optimizer(0.2).init(START)
    for _ in range(10):
        updates, state = optimizer(0.2).update(jax.grad(bowl)(params), state, params)
        params = optax.apply_updates(params, updates)
    settings = {"learning_rates": (0.2,), "target": 0.1}
    whole = measured_on_the_bowl(optimizer, **settings)
    rest = measured_on_the_bowl(optimizer, params, optimizer_state=state, **settings)
    fresh = measured_on_the_bowl(optimizer, params, **settings)
    assert_allclose(rest.steps + 10, whole.steps, rtol=1e-4)
    assert np.all(np.abs(fresh.steps - rest.steps) > 0.2)
    assert rest.at_edge == (True, True, True)


def test_runs_draw_other_examples_and_rates_the_same():
    def loss(params, key, batch_size):
        return slope(params, key, batch_size) + 0.1 * jax.random.normal(key, (2,)) @ params

    def steps(**changes):
        measured = lb.measure_critical_batch_size(
            START, loss, optax.sgd, batch_sizes=(1, 2, 4), learning_rates=(0.3, 0.30001),
            evaluate=bowl, target=0.2, max_steps=200, **changes,
        )  # fmt: skip
        return measured.steps

    one = steps()
    assert len({round(float(value), 3) for value in one[:, 0].ravel()}) == 9  # batch sizes, runs
    assert_allclose(one[:, 0], one[:, 1], rtol=0.01)
    assert_array_equal(one, steps())
    assert np.all(one != steps(seed=1))


def test_reports_progress():
    seen = []

    def progress(tasks):
        for task in tasks:
            seen.append(len(tasks))
            yield task

    measured_on_the_bowl(runs=2, progress=progress)
    assert seen == [6] * 6


def test_a_fit_that_fails_leaves_the_table():
    measured = measured_on_the_bowl()
    with pytest.raises(ValueError, match="hardly fall"):
        _ = measured.fit
    assert np.all(np.isfinite(measured.best_steps))


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"target": 0.001, "max_steps": 20}, ValueError,
         r"at batch size 1, 0 of 4 runs .* max_steps = 20, and the lowest loss was 0.0\d+, at the "
         r"learning rate 1.2 .* Raise the target or max_steps"),
        ({"learning_rates": (50.0, 70.0)}, ValueError, "lowest loss was 4.7.* add rates beyond"),
        ({"target": 5.0}, ValueError, r"target must be below .* evaluate\(params\) = 4.7, got 5.0"),
        ({"make_optimizer": lambda rate: optax.sgd(0.3)}, ValueError,
         "make_optimizer must use its learning rate: at batch size 1"),
        ({"make_optimizer": optax.inject_hyperparams(optax.sgd),
          "optimizer_state": optax.inject_hyperparams(optax.sgd)(0.3).init(START)}, ValueError,
         "inject_hyperparams holds a learning rate of its own"),
        ({"evaluate": lambda params: params}, ValueError, r"evaluate must .* got the shape \(2,\)"),
        ({"batch_sizes": (1, 2, 2)}, ValueError, "batch_sizes must hold 3 or more different"),
        ({"batch_sizes": (1, 2, 2.5)}, TypeError, r"batch_sizes\[2\] must be a Python integer"),
        ({"learning_rates": (0.2, 0.1)}, ValueError, "learning_rates must be increasing"),
        ({"learning_rates": ()}, ValueError, "learning_rates must be increasing, at least one"),
        ({"learning_rates": (0.0, 0.1)}, ValueError, r"learning_rates\[0\] must be in \(0, inf\)"),
    ],
)  # fmt: skip
def test_wrong_arguments(changes, error, said):
    with pytest.raises(error, match=said):
        measured_on_the_bowl(**changes)


def test_low_precision_parameters_with_masters_take_the_steps_of_float32():
    """Without masters, the last small steps of bfloat16 are lost."""
    settings = {"learning_rates": (0.05,), "target": 0.02, "max_steps": 2000}

    def optimizer(rate):
        return lb.master_weights(optax.sgd(rate))

    with jax.numpy_dtype_promotion("standard"):  # optax.apply_updates adds float32 to bfloat16
        low = measured_on_the_bowl(optimizer, START.astype("bfloat16"), **settings)
    full = measured_on_the_bowl(optax.sgd, **settings)
    assert_allclose(low.steps, full.steps, rtol=0.02)
