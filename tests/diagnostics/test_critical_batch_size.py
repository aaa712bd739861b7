"""The fit of the critical batch size, on curves that are known."""

import numpy as np
import pytest

import optax_largebatch as lb

BATCHES = np.array([64, 256, 1024, 4096, 16384])


def curve(critical, minimum):
    return minimum * (1 + critical / BATCHES)


@pytest.mark.parametrize("critical", [40.0, 1000.0, 30000.0])
def test_finds_an_exact_curve(critical):
    fit = lb.fit_critical_batch_size(BATCHES, curve(critical, 300.0))
    np.testing.assert_allclose((fit.critical_batch_size, fit.minimum_steps), (critical, 300), 1e-6)
    np.testing.assert_allclose(fit.residuals, 0, atol=1e-6)
    np.testing.assert_allclose([fit.steps(b) for b in BATCHES], curve(critical, 300.0), 1e-6)
    np.testing.assert_allclose(fit.minimum_examples, 300 * critical, 1e-6)
    assert fit.interval is None


def test_twice_the_least_at_the_critical_batch():
    fit = lb.fit_critical_batch_size(BATCHES, curve(1000.0, 300.0))
    np.testing.assert_allclose(fit.steps(fit.critical_batch_size), 2 * fit.minimum_steps)


def test_is_the_least_squares_of_the_logarithm():
    """No point nearby is better, on data that no curve meets."""
    steps = curve(1000.0, 300.0) * np.array([1.1, 0.9, 1.05, 0.97, 1.02])
    fit = lb.fit_critical_batch_size(BATCHES, steps)

    def loss(critical, minimum):
        return np.sum(np.log(steps / (minimum * (1 + critical / BATCHES))) ** 2)

    best = loss(fit.critical_batch_size, fit.minimum_steps)
    np.testing.assert_allclose(fit.residual, np.sqrt(best / 5), rtol=1e-9)
    assert fit.residual > 0.01
    for factor in (0.99, 1.01):
        assert loss(fit.critical_batch_size * factor, fit.minimum_steps) > best
        assert loss(fit.critical_batch_size, fit.minimum_steps * factor) > best


def noisy(seed, runs=6, noise=0.1):
    draw = np.random.default_rng(seed)
    return [s * np.exp(noise * draw.normal(size=runs)) for s in curve(1000.0, 300.0)]


def test_interval_holds_the_truth_as_often_as_it_says():
    """90% of the intervals. The bootstrap of six runs is somewhat short."""
    intervals = [
        lb.fit_critical_batch_size(BATCHES, noisy(seed), resamples=200).interval
        for seed in range(60)
    ]
    held = np.mean([low < 1000 < high for low, high in intervals])
    assert 0.75 <= held <= 0.98


def test_interval_narrows_with_more_runs_and_is_drawn_from_the_seed():
    few, many = (lb.fit_critical_batch_size(BATCHES, noisy(0, runs)).interval for runs in (5, 80))
    assert few[1] - few[0] > 2 * (many[1] - many[0])
    again = lb.fit_critical_batch_size(BATCHES, noisy(0, 5)).interval
    other = lb.fit_critical_batch_size(BATCHES, noisy(0, 5), seed=1).interval
    assert few == again != other


def test_batch_sizes_may_have_different_numbers_of_runs():
    steps = [[value] * (1 + index) for index, value in enumerate(curve(1000.0, 300.0))]
    fit = lb.fit_critical_batch_size(BATCHES, steps)
    np.testing.assert_allclose(fit.critical_batch_size, 1000.0, rtol=1e-6)
    np.testing.assert_allclose(fit.interval, (1000.0, 1000.0), rtol=1e-6)


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (1e6 / BATCHES, "fall as 1 / batch size throughout.*Add larger"),
        (300.0 + 0 * BATCHES, "hardly fall.*Add smaller"),
        (300.0 + BATCHES, "hardly fall"),
    ],
)
def test_steps_that_do_not_bend_are_an_error(steps, said):
    with pytest.raises(ValueError, match=said):
        lb.fit_critical_batch_size(BATCHES, steps)


@pytest.mark.parametrize(
    ("arguments", "switches", "error", "said"),
    [
        (([64, 64, 128], [3, 3, 2]), {}, ValueError, "batch_sizes must hold at least three"),
        (([64, 128, -1], [3, 2, 1]), {}, ValueError, "batch_sizes must hold positive"),
        ((["a", 128, 256], [3, 2, 1]), {}, TypeError, "batch_sizes must hold numbers"),
        (([64, 128, 256], [3, 2]), {}, ValueError, "steps must have one entry for each of the 3"),
        (([64, 128, 256], [3, [2, 0.0], 1]), {}, ValueError, r"steps\[1\] must hold positive"),
        (([64, 128, 256], [3, [], 1]), {}, ValueError, r"steps\[1\] must hold positive"),
        (([64, 128, 256], [3, 2, 1.8]), {"resamples": 0}, ValueError, "resamples must be >= 1"),
        (([64, 128, 256], [3, 2, 1.8]), {"seed": 0.5}, TypeError, "seed must be a Python integer"),
    ],
)
def test_wrong_arguments(arguments, switches, error, said):
    with pytest.raises(error, match=said):
        lb.fit_critical_batch_size(*arguments, **switches)


# What `docs/recipes.md` says of the published runs.
@pytest.mark.parametrize(
    ("name", "critical", "minimum", "residual"),
    [
        ("bert-large/lamb/mlperf", 12787, 182.6, 0.0636),
        ("resnet50/lars/mlperf", 47066, 944.2, 0.0369),
    ],
)
def test_published_runs(name, critical, minimum, residual):
    runs = lb.recipes.examples_to_target(name)
    fit = lb.fit_critical_batch_size(list(runs), [np.array(own) / b for b, own in runs.items()])
    np.testing.assert_allclose(fit.critical_batch_size, critical, rtol=1e-4)
    np.testing.assert_allclose(fit.minimum_steps, minimum, rtol=1e-3)
    np.testing.assert_allclose(fit.residual, residual, rtol=5e-3)
    low, high = fit.interval
    assert low < critical < high < 1.1 * low
