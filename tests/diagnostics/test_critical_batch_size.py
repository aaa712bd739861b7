"""The fit of the critical batch size, on curves that are known."""

import numpy as np
from numpy.testing import assert_allclose
import pytest
import scipy

import optax_largebatch as lb
from optax_largebatch.diagnostics.noise_scale import student_quantile

BATCHES = np.array([64, 256, 1024, 4096, 16384])


def curve(critical, minimum):
    return minimum * (1 + critical / BATCHES)


@pytest.mark.parametrize("critical", [64 / 900, 40.0, 1000.0, 16384 * 900])
def test_finds_an_exact_curve(critical):
    """Up to a thousand times beyond the batch sizes."""
    fit = lb.fit_critical_batch_size(BATCHES, curve(critical, 300.0))
    assert_allclose((fit.critical_batch_size, fit.minimum_steps), (critical, 300), 1e-6)
    assert_allclose(fit.residuals, 0, atol=1e-6)
    assert_allclose([fit.steps(b) for b in BATCHES], curve(critical, 300.0), 1e-6)
    assert_allclose(fit.minimum_examples, 300 * critical, 1e-6)
    assert_allclose(fit.steps(fit.critical_batch_size), 2 * fit.minimum_steps)
    assert fit.interval is None


def test_is_the_least_squares_of_the_logarithm():
    """No point nearby is better, on data that no curve meets."""
    steps = curve(1000.0, 300.0) * np.array([1.1, 0.9, 1.05, 0.97, 1.02])
    fit = lb.fit_critical_batch_size(BATCHES, steps)

    def loss(critical, minimum):
        return np.sum(np.log(steps / (minimum * (1 + critical / BATCHES))) ** 2)

    best = loss(fit.critical_batch_size, fit.minimum_steps)
    assert_allclose(fit.residual, np.sqrt(best / 5), rtol=1e-9)
    assert fit.residual > 0.01
    for factor in (0.99, 1.01):
        assert loss(fit.critical_batch_size * factor, fit.minimum_steps) > best
        assert loss(fit.critical_batch_size, fit.minimum_steps * factor) > best


def noisy(seed, runs=6, noise=0.1):
    draw = np.random.default_rng(seed)
    return [s * np.exp(noise * draw.normal(size=runs)) for s in curve(1000.0, 300.0)]


FOUR, EIGHT = [128, 512, 2048, 8192], [64, 128, 256, 512, 1024, 2048, 4096, 8192]
RUNS = {
    "2": [2] * 8,
    "3": [3] * 8,
    "5": [5] * 8,
    "10": [10] * 8,
    "1 and 2 by turns": [1, 2] * 4,
    "1, the last 5": [1] * 7 + [5],
}
"""How many runs there are at each batch size; of four, at the last ones."""


def coverage(batches, runs, cases):
    """How many of 100 intervals hold the truth, where runs vary by 10%."""
    draw, counts = np.random.default_rng(0), RUNS[runs][-len(batches) :]
    held = 0
    for _ in range(cases):
        steps = [
            300 * (1 + 1000 / batch) * np.exp(0.1 * draw.normal(size=count))
            for batch, count in zip(batches, counts, strict=True)
        ]
        low, high = lb.fit_critical_batch_size(batches, steps).interval
        held += low <= 1000 <= high
    return 100 * held / cases


@pytest.mark.parametrize("runs", ["2", "1, the last 5"])
def test_interval_holds_the_truth_as_often_as_it_says(runs):
    """90 of 100, within three standard deviations of 300 cases."""
    assert abs(coverage(FOUR, runs, 300) - 90) < 5.2


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("runs", RUNS)
def test_interval_is_as_good_as_the_documentation_says(runs):
    """As docs/guides/choosing_a_batch_size.md says."""
    for sizes in (FOUR, EIGHT):
        assert 89 <= round(coverage(sizes, runs, 1000)) <= 92


def test_runs_count_as_the_mean_of_their_logarithms():
    runs = noisy(0)
    fit = lb.fit_critical_batch_size(BATCHES, runs)
    alone = lb.fit_critical_batch_size(BATCHES, [np.exp(np.log(own).mean()) for own in runs])
    assert_allclose(fit[:2], alone[:2], rtol=1e-9)
    assert_allclose(fit.residuals, alone.residuals, atol=1e-9)


def test_interval_narrows_with_more_runs():
    few, many = (lb.fit_critical_batch_size(BATCHES, noisy(0, runs)).interval for runs in (5, 80))
    assert few[1] - few[0] > 2 * (many[1] - many[0])


def test_interval_ends_nowhere_where_the_runs_do_not_bound_it():
    """The steps hardly fall, and two runs say little of the noise."""
    batches = [1000, 2000, 4000]
    fit = lb.fit_critical_batch_size(batches, [[330.0, 370.0], [325.0], [310.0]])
    assert fit.interval[0] == 0
    fit = lb.fit_critical_batch_size(batches, [[30000.0, 36000.0], [17000.0], [8700.0]])
    assert fit.interval[1] == np.inf


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


@pytest.mark.parametrize("critical", [64 / 1100, 16384 * 1100])
def test_searches_no_further_than_a_thousand_times(critical):
    with pytest.raises(ValueError, match=r"no critical batch size between 0\.064 and 1\.64e"):
        lb.fit_critical_batch_size(BATCHES, curve(critical, 300.0))


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (([64, 64, 128], [3, 3, 2]), ValueError, "batch_sizes must hold 3 or more different"),
        ((["a", 128, 256], [3, 2, 1]), TypeError, "batch_sizes must hold numbers"),
        (([64, 128, 256], [3, 2]), ValueError, "steps must have one entry for each of the 3"),
        (([64, 128, 256], [3, [2, 0.0], 1]), ValueError, r"steps\[1\] must hold positive"),
        (([64, 128, 256], [3, [], 1]), ValueError, r"steps\[1\] must hold positive"),
    ],
)
def test_wrong_arguments(arguments, error, said):
    with pytest.raises(error, match=said):
        lb.fit_critical_batch_size(*arguments)


QUANTILES = [(0.8, 1), (0.8, 40), (0.2, 5), (0.995, 5), (0.05, 2)]
QUANTILES += [(0.95, freedom) for freedom in (1, 1.5, 2, 5, 40, 57, 58, 1e6)]


@pytest.mark.parametrize(("probability", "freedom"), QUANTILES)
def test_quantiles(probability, freedom, both_precisions):
    known = scipy.stats.t.ppf(probability, freedom)
    assert student_quantile(probability, freedom) == pytest.approx(known, rel=2e-5)
